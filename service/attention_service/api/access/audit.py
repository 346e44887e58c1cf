"""The audit log: one line for each change of what the server keeps."""

from typing import Final

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attention_service.api import problems
from attention_service.runtime.callers import caller

log = structlog.get_logger("attention_service.audit")
AUDITED: Final = frozenset({
    "create_module", "import_module", "delete_module", "replace_parameters", "fetch_checkpoint", "cancel_fetch",
    "create_recording", "delete_recording", "load_model", "unload_model", "v2_load", "v2_unload",
})  # fmt: skip
"""The operations that change modules, checkpoints, models or recordings."""


class Audited:
    """The application of a route, whose every request leaves one line with its caller and its outcome."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        self.app = app
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        status: int | None = None  # of a caller who left before the reply
        made = None

        async def noted_send(message: Message) -> None:
            nonlocal status, made
            if message["type"] == "http.response.start":
                status = message["status"]
                made = next((value for name, value in message["headers"] if name == b"location"), None)
            await send(message)

        try:
            await self.app(scope, receive, noted_send)
        finally:
            note(
                caller.get().name,
                self._name,
                target=scope["path"] if made is None else str(made, "latin-1"),
                status=status,
                request_id=problems.request_id.get(),
            )


def note(who: str, what: str, **facts: object) -> None:
    """Write one line of the audit log."""
    log.info("change", who=who, what=what, **facts)

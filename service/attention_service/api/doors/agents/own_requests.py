"""Requests to this application from inside its process, in the name of the caller whose message is answered.

Each takes the whole line of a request that comes from outside, from the id and the key to the reply. So the scopes,
quotas and limits of the caller hold, and every question has its line in the log and its place in the metrics.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final, TypeVar, cast
from urllib.parse import urlencode

from starlette.types import ASGIApp, Message, Scope

from attention_contract.base import WireModel
from attention_contract.errors import from_problem
from attention_contract.operations import Operation
from attention_contract.validation import validate
from attention_contract.wire import JSON, SAFETENSORS, from_body, from_json, to_json
from attention_service.api.handlers import request_id

ReplyT = TypeVar("ReplyT", bound=WireModel)
PATH: Final = "/mcp"
"""The path of the door whose messages are answered so."""
_PASSED_ON: Final = frozenset({b"authorization", b"prefer", b"traceparent", b"tracestate"})
"""Headers of the message that its requests carry too."""


class OwnRequests:
    """Asks operations of the contract as the caller of one message."""

    def __init__(self, app: ASGIApp, message: Scope) -> None:
        """``app``: the whole application; ``message``: the ASGI scope of the message."""
        self._app = app
        self._client = message.get("client")
        self._headers = [(name, value) for name, value in message["headers"] if name in _PASSED_ON]
        self._headers.append((b"host", b"127.0.0.1"))
        if (identity := request_id.get()) is not None:
            self._headers.append((b"x-request-id", identity.encode()))

    async def ask(
        self, operation: Operation[ReplyT], fields: Mapping[str, Any] | None = None, /, **path: str
    ) -> ReplyT:
        """Ask an operation and return its reply. Raises its error, and InvalidRequest for fields that are not valid."""
        media_type = SAFETENSORS if operation.tensors else JSON
        body = await self.fetch(operation, fields, media_type, **path)
        return cast("ReplyT", from_body(cast("type[WireModel]", operation.reply), body, media_type, "reply"))

    async def fetch(
        self,
        operation: Operation[Any],
        fields: Mapping[str, Any] | None,
        media_type: str = SAFETENSORS,
        options: Mapping[str, Any] | None = None,
        /,
        **path: str,
    ) -> bytes:
        """Ask an operation and return its reply as bytes of a media type. ``options``: those of a picture."""
        content = b""
        headers = [*self._headers, (b"accept", media_type.encode())]
        if fields is not None and operation.request is not None:
            content = to_json(validate(operation.request, fields))
            headers += [(b"content-type", JSON.encode()), (b"content-length", str(len(content)).encode())]
        target = operation.path.format(**path)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": operation.method,
            "scheme": "http",
            "path": target,
            "root_path": "",
            "query_string": urlencode(options or {}).encode(),
            "headers": headers,
            "client": self._client,
            "server": ("127.0.0.1", None),
        }
        status, body = await _exchange(self._app, scope, content)
        if status >= 400:
            raise from_problem(status, from_json(body))
        return body


async def _exchange(app: ASGIApp, scope: Scope, content: bytes) -> tuple[int, bytes]:
    """Send one request to an application, and return the status and the body of its response.

    If this is cancelled, the application sees a caller who disconnects: it stops the work and logs why.
    """
    gone = asyncio.Event()
    bodies, pieces, status = [content], list[bytes](), 500

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            pieces.append(message.get("body", b""))

    async def answer() -> None:
        await app(scope, receive, send)

    work = asyncio.create_task(answer())
    try:
        await asyncio.shield(work)
    finally:
        gone.set()
    return status, b"".join(pieces)

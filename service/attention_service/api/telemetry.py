"""Every request gets an id, a log line, and its place in the metrics."""

import random
import re
import time
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attention_contract.wire import VERSION_HEADER
from attention_service import __version__
from attention_service.api import problems
from attention_service.api.access_log import AccessLog, Answered
from attention_service.api.metrics import Metrics
from attention_service.runtime.scheduling.later import Later

VERSION = (VERSION_HEADER.encode(), __version__.encode())
"""The header of every response that tells the server's version."""
_ids = random.Random()  # noqa: S311  # ids must differ; they may be guessed
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class RequestLog:
    """Counts and logs answered requests, many at a time."""

    def __init__(self, metrics: Metrics, access: AccessLog) -> None:
        self._metrics = metrics
        self._access = access
        self._later = Later(self._write)
        metrics.settle.append(self._later.settle)

    def add(self, answered: Answered) -> None:
        """Note a request that was answered just now."""
        self._later.note(answered)

    def settle(self) -> None:
        """Count and log all requests that were noted."""
        self._later.settle()

    def _write(self, answered: list[Answered]) -> None:
        self._metrics.count(answered)
        self._access.write(answered)


class Observe:
    """Middleware that gives each request an id, measures and logs it, and answers its unexpected errors."""

    def __init__(self, app: ASGIApp, requests: RequestLog) -> None:
        self.app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status: int | None = None
        identity = new_identity(scope["headers"])
        problems.request_id.set(identity)

        async def observed_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", identity.encode()), VERSION]
            await send(message)

        try:
            await self.app(scope, receive, observed_send)
        except Exception as fault:
            if status is not None:
                raise
            await problems.render(problems.unexpected(scope["path"], fault))(scope, receive, observed_send)
            problems.forget(fault)
        finally:
            operation = getattr(scope.get("route"), "name", None) or "unknown"
            seconds = time.perf_counter() - started
            self._requests.add(
                Answered(time.time(), scope["method"], scope["path"], operation, status or 500, seconds, identity)
            )


def new_identity(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id of a request: the one that its caller gave it, or a new one."""
    return _given_id(headers) or f"{_ids.getrandbits(128):032x}"


def _given_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The id that the caller gave the request, if it is fit to be repeated."""
    for name, value in headers:
        if name == b"x-request-id":
            given = str(value, "latin-1")
            return given if _REQUEST_ID.fullmatch(given) else None
    return None

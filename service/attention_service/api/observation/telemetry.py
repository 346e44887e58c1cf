"""Every request gets an id, a log line, and its place in the metrics."""

import random
import re
import time
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attention_contract.errors import Cancelled, HeadTooLarge
from attention_contract.wire import VERSION_HEADER
from attention_service import __version__
from attention_service.api import problems
from attention_service.api.access.security_headers import SECURITY_HEADERS, page_headers
from attention_service.api.http_limits.connection_limits import CAME, CROWDED
from attention_service.api.observation.access_log import AccessLog, Answered
from attention_service.api.observation.metrics import Metrics
from attention_service.api.observation.tracing import add_spans
from attention_service.api.request_head import HEADERS, Headers, check_head
from attention_service.runtime.callers import caller
from attention_service.runtime.request_timing import Later, RequestTiming, timing
from attention_service.settings import Settings, listed

REQUEST_ID: Final = b"x-request-id"
VERSION: Final = (VERSION_HEADER.encode(), __version__.encode())
"""The header of every response that tells the server's version."""
_HEADS: Final = frozenset({"http.response.start", "websocket.http.response.start"})
"""The messages that begin a response; of a WebSocket, one that refuses the handshake."""
_ACCEPT: Final = "websocket.accept"
_SHOWN = 256
"""Characters of a path in the log, at most."""
_ids = random.Random()  # noqa: S311  # ids must differ; they may be guessed
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class RequestLog:
    """Counts and logs answered requests, many at a time."""

    def __init__(self, metrics: Metrics, access: AccessLog, *, traced: bool) -> None:
        self._traced = traced
        self._metrics = metrics
        self._access = access
        self._later = Later(self._write)
        metrics.settle.append(self._later.settle)

    def add(self, answered: Answered) -> None:
        """Note a request that was answered just now, in whose context this is called."""
        if self._traced and (span := add_spans(answered)) is not None:
            answered.timing.trace = f"{span.trace_id:032x}"
        self._later.note(answered)

    def message_log(self, path: str, name: str) -> Callable[[int, float], None]:
        """The function that notes a request which messages of a stream made, with its status and seconds."""

        def note(status: int, seconds: float) -> None:
            identity, noted = problems.request_id.get() or "", timing.get() or RequestTiming()
            self.add(Answered(time.time(), "WS", path, name, status, seconds, identity, caller.get().name, noted))

        return note

    def settle(self) -> None:
        """Count and log all requests that were noted."""
        self._later.settle()

    def _write(self, answered: list[Answered]) -> None:
        self._metrics.count(answered)
        self._access.write(answered)


class Observe:
    """Middleware that gives each request an id, measures and logs it, and answers its unexpected errors."""

    def __init__(self, app: ASGIApp, requests: RequestLog, settings: Settings, *, sends_request_id: bool) -> None:
        """``sends_request_id``: False if a server or middleware around the application sets the header X-Request-ID."""
        self.app = app
        self._requests = requests
        self._settings = settings
        self._pages = page_headers(listed(settings.frame_origins))
        self._sends_request_id = sends_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or serve one WebSocket."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status: int | None = None
        scope[HEADERS] = headers = dict(scope["headers"])
        identity = new_identity(headers)
        problems.request_id.set(identity)
        safety = self._pages.get(scope["path"], SECURITY_HEADERS)
        noted = RequestTiming()
        timing.set(noted)
        state = scope.get("state", {})
        refusal = state.get(CROWDED) or self._fault_of_head(scope)
        if (came := state.get(CAME)) is not None:
            noted.note("queue", came)
            started -= time.monotonic() - came
        written: float | None = None
        own = [(REQUEST_ID, identity.encode()), VERSION] if self._sends_request_id else [VERSION]

        async def observed_send(message: Message) -> None:
            nonlocal status, written
            if message["type"] in _HEADS:
                status, written = message["status"], time.monotonic()
                message["headers"] = [*message.get("headers", ()), *own, *safety]
            elif message["type"] == _ACCEPT:
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        try:
            if refusal is None:
                await self.app(scope, receive, observed_send)
            else:  # before anything looks at the request, which costs less
                await problems.render(refusal)(scope, receive, observed_send)
        except Exception as fault:
            if status is not None or scope["type"] == "websocket":
                raise
            await problems.render(problems.unexpected(scope["path"], fault))(scope, receive, observed_send)
            problems.forget(fault)
        finally:
            operation = getattr(scope.get("route"), "name", None) or "unknown"
            if written is not None:
                noted.note("write", written)
            seconds, method = time.perf_counter() - started, scope.get("method", "WS")
            # The messages of an accepted handshake are counted. A request without a response lost its caller.
            if scope["type"] == "http" or status is not None:
                outcome = status or Cancelled.status
                answered = time.time(), method, scope["path"][:_SHOWN], operation, outcome, seconds, identity
                self._requests.add(Answered(*answered, caller.get().name, noted))

    def _fault_of_head(self, scope: Scope) -> HeadTooLarge | None:
        """The refusal of a head over the limits, which a server other than this package's may have let through."""
        try:
            check_head(scope["headers"], len(scope["path"]) + len(scope["query_string"]), self._settings)
        except HeadTooLarge as fault:
            return fault
        return None


def new_identity(headers: Headers) -> str:
    """The id of a request: the one that its caller gave it if it is fit to be repeated, or a new one."""
    given = headers.get(REQUEST_ID)
    if given is not None and _REQUEST_ID.fullmatch(text := str(given, "latin-1")):
        return text
    return f"{_ids.getrandbits(128):032x}"

"""Uvicorn's HTTP connections within the limits of a ``ConnectionLimits``. Reading and writing stay uvicorn's."""

import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from attention_contract.errors import PROBLEM_MEDIA_TYPE, AttentionError, Draining, HeadTooLarge, TooSlow, Unreadable
from attention_contract.wire import to_json
from attention_service.api.http_limits.connection_limits import BODY_VIEWS, CAME, CROWDED, LATE, LEAVING_S
from attention_service.api.http_limits.guarded_connection import HEAD, LEAST_BYTES, GuardedConnection
from attention_service.api.request_head import check_head, too_large, wait_seconds

_BODIES: Final = frozenset({"POST", "PUT"})
"""Methods of requests that have a body."""
_MOST_PIPELINED: Final = 16
"""Requests behind the one that is answered, after which no more are read."""
_VERSIONS: Final = frozenset({"1.0", "1.1"})
_UPGRADE_HEADERS: Final = frozenset({b"upgrade", b"connection", b"http2-settings"})
"""Headers of an upgrade, which are left out if the upgrade is ignored."""


class GuardedHttp(GuardedConnection, HttpToolsProtocol):
    """An HTTP connection within the limits of its ``ConnectionLimits``."""

    _max_head = 0
    _received = 0
    """Bytes that came."""
    _mark = 0
    """``_received`` at the last end of a head or piece of a body: what came since is a head or a trailer."""
    _heads = 0
    """Heads that came whole."""
    _answered: RequestResponseCycle | None = None
    """The request that is being answered, or was last."""
    _ignored_upgrade: int | None = None
    """Position in the last data behind the head of a request whose upgrade is ignored."""

    def connection_made(self, transport: Any) -> None:
        """Count the connection, and refuse it if there are too many."""
        super().connection_made(transport)
        self._max_head = self.limits.settings.max_head_bytes
        self.flow = FlowControl(self)  # type: ignore[arg-type]  # pauses and resumes this, which may hold bytes
        refusal = self.limits.enter(self, self._address)
        if refusal is not None:
            self._refuse(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.limits.leave(self, self._address)
        if self.transport is not None:
            self.forget_held()
            super().connection_lost(exc)

    @property
    def read_paused(self) -> bool:  # type: ignore[override]
        """True while uvicorn wants no more bytes."""
        return self.flow.read_paused

    def _may_parse(self) -> bool:
        return len(self.pipeline) < _MOST_PIPELINED and not self.transport.is_closing()

    def _parse(self, portion: bytes) -> None:
        self._received += len(portion)
        HttpToolsProtocol.data_received(self, portion)
        if self._ignored_upgrade is not None:
            self._read_without_upgrade(portion)
        if self._received - self._mark > self._max_head and self._refusal is None:
            self._refuse(too_large(self._received - self._mark, self.limits.settings))

    def on_response_complete(self) -> None:
        """Begin the next request, and read on."""
        super().on_response_complete()
        if self.held:
            self.go_on()

    def on_headers_complete(self) -> None:
        """Begin the request if its head is within the limits."""
        settings, came = self.limits.settings, self._received - self._mark
        self._mark = self._received
        self._heads += 1
        self.work += HEAD
        self.payload += HEAD * LEAST_BYTES  # however short: requests have limits of their own
        if len(self.headers) > settings.max_headers or came > settings.max_head_bytes:  # or a part of the body came
            try:
                check_head(self.headers, len(self.url), settings)
            except HeadTooLarge as refusal:
                self._refusal = refusal
                raise
        upgrades = self.parser.should_upgrade()
        names = dict(self.headers)
        plain = b"host" in names and len(names) == len(self.headers) and self.url[:1] == b"/"
        plain = plain and not upgrades and self.parser.get_http_version() == "1.1"
        if not plain and (fault := self._fault_of_head()) is not None:
            self._refusal = Unreadable(fault)
            raise self._refusal
        if upgrades and self.parser.get_method() != b"CONNECT" and not self._should_upgrade():
            self._ignored_upgrade = 0
            return
        super().on_headers_complete()

    def _fault_of_head(self) -> str | None:
        """Return what is wrong with a head that llhttp takes: its version, its Host or its target (RFC 9112)."""
        version = self.parser.get_http_version()
        hosts = [value for name, value in self.headers if name == b"host"]
        if version not in _VERSIONS:
            return f"the request is HTTP/{version}; this server reads HTTP/1.1"
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            return f"a request of HTTP/1.1 has one Host header; this one has {len(hosts)}"
        if self.url[:1] != b"/" and hosts and not self._is_own_target(hosts[0]):
            return "the target is of another host than the Host header; send its path alone"
        if self.cycle is not None and not self.cycle.response_complete and self._upgrades:
            return "a WebSocket begins on a connection of its own, or after the answers to the requests before it"
        return None

    def _is_own_target(self, host: bytes) -> bool:
        """True for ``*``, for what CONNECT names, and for an absolute target of this host."""
        if self.url == b"*" or self.parser.get_method() == b"CONNECT":
            return True
        _, _, rest = self.url.partition(b"://")
        return rest.partition(b"/")[0].partition(b"?")[0].lower() == host.strip().lower()

    @property
    def _upgrades(self) -> bool:
        return bool(self.parser.should_upgrade()) and self._should_upgrade()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Begin a request, if it has a body when the entrance lets it in."""
        self._answered = cycle
        cycle.scope["extensions"] = {BODY_VIEWS: {}}  # uvicorn's connections take what their transport takes
        entrance = self.limits.entrance
        if cycle.scope["method"] not in _BODIES or entrance is None or entrance.enter():
            super()._start_asgi_task(cycle, app)
            return
        begin = super()._start_asgi_task
        scope: Any = cycle.scope
        state = scope["state"]
        state[CAME] = time.monotonic()

        headers = dict(scope["headers"])

        def enter(refusal: AttentionError | None) -> None:
            if cycle.disconnected:
                return
            if refusal is not None:
                state[CROWDED] = refusal
            begin(cycle, app)

        entrance.wait(self.limits.name_of(scope), enter, wait_seconds(headers, self.limits.settings.default_wait_s))

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body."""
        self._mark = self._received
        self.work += 1
        self.payload += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request, unless it begins again without its upgrade."""
        if self._ignored_upgrade is None:
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        fault = sys.exc_info()[1]
        if self._ignored_upgrade is not None and fault is not None:
            self._ignored_upgrade = fault.args[0]

    def _read_without_upgrade(self, data: bytes) -> None:
        """Read the request again without the upgrade, for which its parser skips the body (RFC 9110, section 7.8)."""
        rest, self._ignored_upgrade = data[self._ignored_upgrade :], None
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % line for line in self.headers if line[0] not in _UPGRADE_HEADERS]
        tokens = [token.strip().lower() for name, value in self.headers if name == b"connection"
                  for token in value.split(b",")]  # fmt: skip
        lines += [b"connection: %s" % token for token in tokens if token not in _UPGRADE_HEADERS]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._heads -= 1
        HttpToolsProtocol.data_received(self, b"\r\n".join([*lines, b"", b""]))
        if rest and self._refusal is None:
            HttpToolsProtocol.data_received(self, rest)

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over."""
        self.forget_held()
        self._unset_keepalive_if_required()
        super().handle_websocket_upgrade()
        self.limits.leave(self, self._address)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that cannot be read, or whose head is too large."""
        fault = "the request is not HTTP/1.1 (RFC 9112); check the lines of its head and the sizes of its chunks"
        self._refuse(self._refusal or Unreadable(fault))

    def check(self, now: float) -> None:
        """Cut the connection if its peer is silent, sends too slowly or does not read."""
        settings, cycle = self.limits.settings, self.cycle
        if self._refusal is not None and next(self._unanswered(), None) is None:
            if not self._enters(("leaving", 0), now, 0) and now - self._since > LEAVING_S:
                self._cut()
        elif self._check_reader(now):
            pass
        elif self._refusal is not None:
            self._phase = None
        elif self.is_flood(now):
            self._refuse(TooSlow("the request arrives in pieces that are too small; send more bytes in each"))
        elif cycle is not None and not cycle.response_complete:
            if not cycle.more_body or self.flow.read_paused:
                self._phase = None
            else:
                self._check_body(now)
        elif self.timeout_keep_alive_task is not None:
            self._phase = None  # idle, for which uvicorn has a timer
        elif not self._enters(("head", self._heads), now, 0) and now - self._since > settings.head_timeout_s:
            came = self._received - self._mark
            limit = settings.head_timeout_s
            refusal = TooSlow(
                f"the request's head was not complete after {now - self._since:.0f} s; head_timeout_s allows {limit:g}",
                limit=limit,
            )
            self._refuse(refusal, silently=not came)

    def _check_body(self, now: float) -> None:
        settings, stopping_at = self.limits.settings, self.limits.stopping_at
        new = self._enters(("body", self._heads), now, self._received)
        if LATE in self.cycle.scope["state"]:
            if now - self._since > LEAVING_S:
                self._cut()
        elif stopping_at is not None and now > stopping_at:
            self._give_up_body(
                Draining("the server stopped before the body was complete; send it to another server, or again later"),
                now,
            )
        elif not new and now - self._since > settings.body_timeout_s:
            came, least = self._received - self._base, int(settings.least_rate * settings.body_timeout_s)
            if came < least:
                self._give_up_body(
                    TooSlow(
                        f"{came} bytes of the body came in {now - self._since:.0f} s; least_rate and body_timeout_s "
                        f"ask for {least}. Send the request again over a faster connection",
                        limit=least,
                        actual=came,
                    ),
                    now,
                )
            self._since, self._base = now, self._received

    def _give_up_body(self, error: AttentionError, now: float) -> None:
        """Have the application answer with an error. The connection is cut soon, whether it answers or not."""
        self.limits.ended[error.code] += 1
        self._since = now
        self.cycle.scope["state"][LATE] = error
        self.cycle.keep_alive = False
        self.cycle.message_event.set()

    def _refuse(self, error: AttentionError, *, silently: bool = False) -> None:
        """Answer what came whole, then with an error if nothing did, and read no more.

        The connection ends when the peer has read the answers.
        """
        self._refusal = error
        self.forget_held()
        self.limits.ended[error.code] += 1
        if self._gives_up_answer():
            self._cut()
            return
        last = next(self._unanswered(), None)
        if last is not None:
            last.keep_alive = False
        elif silently or not self.transport.can_write_eof() or len(self.limits) > self.limits.crowded:
            self._cut()
        else:
            self.transport.write(response(error, with_error=self.limits.settings.oip))
            self.transport.write_eof()

    def _gives_up_answer(self) -> bool:
        """Leave a request unanswered that has not come whole. True if its answer has begun already."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.more_body:
            return False
        if self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
        elif cycle.response_started:
            return True
        cycle.response_complete = cycle.disconnected = True
        cycle.message_event.set()
        return False

    def _unanswered(self) -> Iterator[RequestResponseCycle]:
        """Requests that came whole and have no whole answer yet, the last first."""
        for cycle, _ in self.pipeline:
            yield cycle
        if self._answered is not None and not self._answered.response_complete:
            yield self._answered


def response(error: AttentionError, *, with_error: bool = False) -> bytes:
    """The whole answer that refuses a connection.

    ``with_error``: with the member ``error`` of the Open Inference Protocol too, since the path may not have come.
    """
    body = to_json(error.to_problem() | ({"error": error.detail} if with_error else {}))
    lines = [
        b"content-type: " + PROBLEM_MEDIA_TYPE.encode(),
        b"content-length: %d" % len(body),
        b"connection: close",
    ]
    if error.retry_after is not None:
        lines.append(b"retry-after: %d" % error.retry_after)
    return STATUS_LINE[error.status] + b"\r\n".join([*lines, b"", body])

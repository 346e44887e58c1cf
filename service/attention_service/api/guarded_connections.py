"""Uvicorn's protocols within the limits of a ``Guard``. Reading and writing stay uvicorn's."""

import asyncio
import sys
import time
from typing import Any, Final

import httptools
from uvicorn._types import ASGI3Application, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from attention_contract.errors import PROBLEM_MEDIA_TYPE, AttentionError, Draining, HeadTooLarge, TooSlow, Unreadable
from attention_contract.wire import to_json
from attention_service.api.descriptors import reset_at_close, unacknowledged
from attention_service.api.guard import CAME, CROWDED, LATE, Guard
from attention_service.api.negotiation import wait

_BODIES: Final = frozenset({"POST", "PUT"})
"""Methods of requests that have a body."""
_HEAD_END: Final = b"\r\n\r\n"
_LEAVING_S: Final = 2.0
"""Seconds for which a refused caller may read its refusal."""
_UPGRADE_HEADERS: Final = frozenset({b"upgrade", b"connection", b"http2-settings"})
"""Headers of an upgrade, which are left out if the upgrade is ignored."""


class _Watched:
    """Everything that a connection did since the guard last saw progress."""

    transport: asyncio.Transport
    guard: Guard
    _phase: tuple[str, int] | None = None
    _since = 0.0
    _base = 0
    _taken = 0
    """Bytes that the peer took while the write buffer was watched."""
    _level = 0
    """Bytes that the peer had not taken when last seen."""

    def _enters(self, phase: tuple[str, int] | None, now: float, base: int) -> bool:
        """Begin to watch a phase. False if it is watched already."""
        if phase == self._phase:
            return False
        self._phase, self._since, self._base = phase, now, base
        return True

    def _note_level(self) -> None:
        level = self._unread()
        self._taken += max(self._level - level, 0)
        self._level = level

    def _unread(self) -> int:
        """Bytes that the peer has not taken, those in the system's buffer included."""
        return self.transport.get_write_buffer_size() + unacknowledged(self.transport.get_extra_info("socket"))

    def _cut(self) -> None:
        """Reset the connection, so that the system frees what the peer has not taken."""
        reset_at_close(self.transport.get_extra_info("socket"))
        self.transport.abort()

    def _check_reader(self, now: float) -> bool:
        """Cut a peer that does not read what it was sent. True while there is something to read."""
        if self.transport.get_write_buffer_size() == 0:
            return False
        self._note_level()
        settings = self.guard.settings
        if self._enters(("write", 0), now, self._taken):
            self._least = min(int(settings.least_rate * settings.write_timeout_s), self._level)
        elif now - self._since > settings.write_timeout_s:
            if self._taken - self._base < self._least:
                self.guard.ended["reader_too_slow"] += 1
                self._cut()
            self._phase = None
        return True

    def pause_writing(self) -> None:
        """Note how much the peer has not taken."""
        self._level = self._unread()
        super().pause_writing()  # type: ignore[misc]

    def resume_writing(self) -> None:
        """Note how much the peer took."""
        self._note_level()
        super().resume_writing()  # type: ignore[misc]


class GuardedStream(_Watched, WebSocketsSansIOProtocol):
    """A WebSocket, counted with the other connections and cut if its peer does not read."""

    guard: Guard
    _address: str | None = None

    def connection_made(self, transport: Any) -> None:
        """Count the connection. Its HTTP request was admitted."""
        self.guard = self.config.app.state.guard  # type: ignore[union-attr]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else None
        self.guard.enter(self, self._address)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.guard.leave(self, self._address)
        super().connection_lost(exc)

    async def send(self, message: ASGISendEvent) -> None:
        """Send a message, and wait until the peer has taken so much of it that another may follow.

        Until then the caller holds its memory. The base class waits before it writes, not after.
        """
        await super().send(message)
        await self.writable.wait()

    def check(self, now: float) -> None:
        """Cut the connection if its peer does not read."""
        if not self._check_reader(now):
            self._enters(None, now, 0)


class GuardedHttp(_Watched, HttpToolsProtocol):
    """An HTTP connection within the limits of its ``Guard``."""

    guard: Guard
    _address: str | None = None
    _max_head = 0
    _received = 0
    """Bytes that came."""
    _mark = 0
    """``_received`` at the last end of a head or piece of a body: what came since is a head or a trailer."""
    _heads = 0
    """Heads that came whole."""
    _refusal: AttentionError | None = None
    _ignored_upgrade: int | None = None
    """Position in the last data behind the head of a request whose upgrade is ignored."""

    def connection_made(self, transport: Any) -> None:
        """Count the connection, and refuse it if there are too many."""
        self.guard = self.config.app.state.guard  # type: ignore[union-attr]
        self._max_head = self.guard.settings.max_head_bytes
        super().connection_made(transport)
        self._address = self.client[0] if self.client else None
        refusal = self.guard.enter(self, self._address)
        if refusal is not None:
            self._refuse(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.guard.leave(self, self._address)
        if self.transport is not None:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Let uvicorn read, a part at a time while a head arrives, so that a head too large is not kept."""
        most = self._max_head
        if len(data) > most and not self._in_body() and data.find(_HEAD_END, 0, most) < 0:
            for start in range(0, len(data), most):
                if self.transport.get_protocol() is self:
                    self.data_received(data[start : start + most])
            return
        if self._refusal is not None:
            return
        self._received += len(data)
        super().data_received(data)
        if self._ignored_upgrade is not None:
            self._read_without_upgrade(data)
        if self._received - self._mark > self._max_head and self._refusal is None:
            self._refuse(self._too_large(self._received - self._mark))

    def _in_body(self) -> bool:
        return self.cycle is not None and self.cycle.more_body

    def on_headers_complete(self) -> None:
        """Begin the request if its head is within the limits."""
        settings, came = self.guard.settings, self._received - self._mark
        self._mark = self._received
        self._heads += 1
        if len(self.headers) > settings.max_headers:
            self._refusal = HeadTooLarge(
                f"the head has {len(self.headers)} headers; max_headers allows {settings.max_headers}",
                limit=settings.max_headers,
                actual=len(self.headers),
            )
            raise self._refusal
        if came > settings.max_head_bytes:  # a part of the body may be among it
            size = len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])
            if size > settings.max_head_bytes:
                self._refusal = self._too_large(size)
                raise self._refusal
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT" and not self._should_upgrade():
            self._ignored_upgrade = 0
            return
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Begin a request, if it has a body when the entrance lets it in."""
        entrance = self.guard.entrance
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

        entrance.wait(self.guard.name_of(scope), enter, wait(headers, self.guard.settings.default_wait_s))

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body."""
        self._mark = self._received
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
        super().data_received(b"\r\n".join([*lines, b"", b""]))
        if rest and self._refusal is None:
            super().data_received(rest)

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over."""
        super().handle_websocket_upgrade()
        self.guard.leave(self, self._address)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that cannot be read, or whose head is too large."""
        if self._refusal is None:
            fault = "the request is not HTTP/1.1 (RFC 9112); check the lines of its head and the sizes of its chunks"
            if (cycle := self.cycle) is not None and cycle.more_body and not cycle.response_started:
                cycle.response_complete = cycle.disconnected = True  # its body is at fault: this is its answer
                cycle.message_event.set()
            self._refuse(Unreadable(fault))
        else:
            self._refuse(self._refusal)

    def check(self, now: float) -> None:
        """Cut the connection if its peer is silent, sends too slowly or does not read."""
        settings, cycle = self.guard.settings, self.cycle
        if self._refusal is not None:
            if not self._enters(("leaving", 0), now, 0) and now - self._since > _LEAVING_S:
                self._cut()
        elif self._check_reader(now):
            pass
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
                f"the head was not whole after {now - self._since:.0f} s; head_timeout_s allows {limit:g}", limit=limit
            )
            self._refuse(refusal, silently=not came)

    def _check_body(self, now: float) -> None:
        settings, stopping_at = self.guard.settings, self.guard.stopping_at
        new = self._enters(("body", self._heads), now, self._received)
        if LATE in self.cycle.scope["state"]:
            if now - self._since > _LEAVING_S:
                self._cut()
        elif stopping_at is not None and now > stopping_at:
            self._give_up_body(Draining("the server stopped before the body was complete; send it to another"), now)
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
        self.guard.ended[error.code] += 1
        self._since = now
        self.cycle.scope["state"][LATE] = error
        self.cycle.keep_alive = False
        self.cycle.message_event.set()

    def _too_large(self, size: int) -> HeadTooLarge:
        most = self.guard.settings.max_head_bytes
        return HeadTooLarge(
            f"the head has at least {size} bytes; max_head_bytes allows {most}", limit_bytes=most, needed_bytes=size
        )

    def _refuse(self, error: AttentionError, *, silently: bool = False) -> None:
        """Answer with an error and read no more. The connection ends when the peer has read the answer."""
        self._refusal = error
        self.guard.ended[error.code] += 1
        answering = self.cycle is not None and not self.cycle.response_complete
        if silently or answering or not self.transport.can_write_eof() or len(self.guard) > self.guard.crowded:
            self._cut()
            return
        self.transport.write(_response(error))
        self.transport.write_eof()


def _response(error: AttentionError) -> bytes:
    body = to_json(error.to_problem())
    lines = [
        b"content-type: " + PROBLEM_MEDIA_TYPE.encode(),
        b"content-length: %d" % len(body),
        b"connection: close",
    ]
    if error.retry_after is not None:
        lines.append(b"retry-after: %d" % error.retry_after)
    return STATUS_LINE[error.status] + b"\r\n".join([*lines, b"", body])

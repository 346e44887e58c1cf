"""Uvicorn's WebSockets within the limits of a ``ConnectionLimits``. Reading and writing stay uvicorn's."""

from collections.abc import Callable
from typing import Any, Final

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import HeaderLineTooLong, InvalidState, RequestLineTooLong, TooManyHeaders
from websockets.frames import DATA_OPCODES, Frame

from attention_contract.errors import AttentionError, HeadTooLarge, Unreadable
from attention_service.api.http_limits.connection_limits import LEAVING_S
from attention_service.api.http_limits.guarded_connection import GuardedConnection
from attention_service.api.http_limits.guarded_http import response
from attention_service.runtime.scheduling.budget import UNCOUNTED, BodyMemory

_POLICY: Final = 1008
_TRY_AGAIN: Final = 1013
_TOO_LARGE: Final = (HeaderLineTooLong, RequestLineTooLong, TooManyHeaders)


class GuardedStream(GuardedConnection, WebSocketsSansIOProtocol):
    """A WebSocket, counted with the other connections.

    It is cut if its peer does not read, is too slow with its handshake or a message, or sends many frames of nothing.
    """

    _memory: BodyMemory | None = None
    """The memory of a message that has not come whole."""
    _counted = 0
    """Bytes of it that ``_memory`` holds."""
    _messages = 0

    def connection_made(self, transport: Any) -> None:
        """Count the connection. Its HTTP request was admitted."""
        super().connection_made(transport)
        self.limits.enter(self, self._address)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, and free a frame that has not come whole: its parser refers to itself."""
        self.forget_held()
        self._give_back()
        self.conn.reader.discard()
        self.limits.leave(self, self._address)
        super().connection_lost(exc)

    def _may_parse(self) -> bool:
        """Return False while a message waits for the application, or pongs for the peer."""
        return not self.read_paused and self.writable.is_set() and not self.transport.is_closing()

    def _parse(self, portion: bytes) -> None:
        WebSocketsSansIOProtocol.data_received(self, portion)
        if not self.handshake_initiated:
            if (fault := self.conn.handshake_exc) is not None:
                self._refuse(fault)
        elif not self.close_sent:
            self._count_unfinished()

    def handle_events(self) -> None:
        """Count the frames, and handle them."""
        events = self.conn.events
        self.work += len(events)
        self.payload += sum(
            [len(frame.data) for frame in events if isinstance(frame, Frame) and frame.opcode in DATA_OPCODES]
        )
        super().handle_events()

    def send_receive_event_to_app(self) -> None:
        """Hand a whole message to the application, which counts its memory itself."""
        self._messages += 1
        self._give_back()
        super().send_receive_event_to_app()

    async def receive(self) -> ASGIReceiveEvent:
        """Return the next message, and parse on."""
        message = await super().receive()
        self.go_on()
        return message

    async def send(self, message: ASGISendEvent) -> None:
        """Send a message, and wait until the peer has taken so much of it that another may follow.

        Until then the caller holds its memory. The base class waits before it writes, not after.
        """
        await super().send(message)
        await self.writable.wait()

    def resume_writing(self) -> None:
        """Parse on, now that the peer has read."""
        super().resume_writing()
        self.go_on()

    def shutdown(self) -> None:
        """Close the connection for the server's stop, which no fault of one connection may end."""
        try:
            super().shutdown()
        except (InvalidState, AssertionError):  # its handshake or its close is under way
            self._cut()

    def check(self, now: float) -> None:
        """Cut the connection if its peer does not read, is too slow, or floods it with frames of nothing."""
        settings = self.limits.settings
        if self.transport.is_closing() or self.close_sent:
            if not self._enters(("leaving", 0), now, 0) and now - self._since > LEAVING_S + self.close_timeout:
                self._cut()
        elif self._check_reader(now):
            pass
        elif not self.handshake_complete:
            if now - self._made > settings.head_timeout_s:
                self._cut()
        elif self.is_flood(now):
            self._close(_POLICY, "too many frames with too little in them")
        elif self._unfinished() and not self.read_paused:
            new = self._enters(("message", self._messages), now, self._unfinished())
            if not new and now - self._since > settings.body_timeout_s:
                if self._unfinished() - self._base < int(settings.least_rate * settings.body_timeout_s):
                    self._close(_POLICY, "the message came too slowly")
                self._since, self._base = now, self._unfinished()
        else:
            self._phase = None

    def _unfinished(self) -> int:
        """Bytes of a message that has not come whole."""
        return (self.conn.current_size or 0) + len(self.conn.reader.buffer)

    def _count_unfinished(self) -> None:
        size = self._unfinished()
        if size <= max(self._counted, UNCOUNTED):
            return
        if self._memory is None:
            self._memory = BodyMemory(self.config.app.state.engine.host)  # type: ignore[union-attr]
        try:
            self._memory.hold(size - self._counted)
        except AttentionError as error:
            self._close(_TRY_AGAIN, f"no memory for the message ({error.code})")
        else:
            self._counted = size

    def _give_back(self) -> None:
        if self._memory is not None:
            self._memory.give_back()
        self._memory, self._counted = None, 0

    def _refuse(self, fault: Exception) -> None:
        """Answer a handshake that cannot be read. ``websockets`` has no answer for most of them."""
        large = isinstance(fault, _TOO_LARGE)
        kind: Callable[[str], AttentionError] = HeadTooLarge if large else Unreadable
        error = kind(f"the handshake of a WebSocket cannot be read: {fault.__cause__ or fault}")
        self.limits.ended[error.code] += 1
        self.forget_held()
        self.close_sent = True
        self.transport.write(response(error))
        self.transport.close()

    def _close(self, code: int, reason: str) -> None:
        """End the connection, with a close frame that its peer may read."""
        self.limits.ended["too_slow" if code == _POLICY else "overloaded"] += 1
        self.forget_held()
        self._give_back()
        self.conn.fail(code, reason)
        self.handle_parser_exception()

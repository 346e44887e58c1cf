"""A connection within its limits: what it sends is parsed so much at a time, and it is cut if its peer does not read.

Uvicorn's protocols parse all that one read brought: up to 256 KiB, which may be ten thousand heads, chunks or frames of
a few bytes. Here the parser gets a portion at a time and says how much work it made of it. Once a connection has used
its share of a turn of the event loop, the rest is held and its reading pauses until the next turn.
"""

import asyncio
import time
from typing import Any, Final

from attention_contract.errors import AttentionError
from attention_service.api.http_limits.connection_limits import ConnectionLimits
from attention_service.api.http_limits.descriptors import reset_at_close, unacknowledged

TURN: Final = 64
"""Work of one connection in one turn of the event loop: a chunk, a piece of a body or a frame is 1, a head is 8."""
HEAD: Final = 8
_SMALLEST, _LARGEST = 256, 2**16
"""Bytes of a portion."""
_PORTION: Final = 16
"""Work of a portion above which the next ones are smaller; up to it they grow. A request with its body makes 9."""
MOST_PER_S: Final = 5_000
"""Work a second above which pieces must carry something."""
LEAST_BYTES: Final = 16
"""Payload for each unit of work, at least, of a connection that causes more than that."""
_PATIENCE: Final = 5
"""Seconds in a row with more work and less payload, after which it is a flood."""


class GuardedConnection:
    """The part that HTTP connections and WebSockets share, before uvicorn's protocol. Used from the event loop only."""

    transport: asyncio.Transport
    limits: ConnectionLimits
    read_paused: bool
    """True while uvicorn wants no more bytes."""
    work = 0
    """Work so far, which the parser's callbacks add."""
    payload = 0
    """Bytes of bodies and messages so far, which they add too."""
    held = b""
    """Bytes that came and were not parsed, from ``_start`` on."""
    _start = 0
    _portion = 2**14
    _turn: asyncio.Handle | None = None
    _refusal: AttentionError | None = None
    _address: str | None = None
    _made = 0.0
    """The time of ``time.monotonic`` at which the connection came."""
    _seen = (0, 0)
    """Work and payload when the connection was last checked, at ``_seen_at``."""
    _seen_at = 0.0
    _strikes = 0
    _phase: tuple[str, int] | None = None
    """The work of the connection since ``_since`` without progress; ``_base``: the progress before."""
    _since = 0.0
    _base = 0
    _taken = 0
    """Bytes that the peer took while the write buffer was watched."""
    _level = 0
    """Bytes that the peer had not taken when last seen."""

    def connection_made(self, transport: Any) -> None:
        """Begin the connection, within the limits of its server."""
        self.limits = self.config.app.state.limits  # type: ignore[attr-defined]
        super().connection_made(transport)  # type: ignore[misc]
        client = self.client  # type: ignore[attr-defined]
        self._address = client[0] if client else None
        self._made = self._seen_at = time.monotonic()

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        """Parse what came, now or in later turns. After a refusal it is left unread."""
        if self._refusal is not None:
            return
        if self.held:  # it was on its way when reading was paused
            self.held, self._start = self.held[self._start :] + data, 0
        elif len(data) <= self._portion and self._may_parse():
            self._parse_portion(data)
        else:
            self.held, self._start = data, 0
            self._parse_held()

    def _may_parse(self) -> bool:
        """Return False while the connection has enough to do, or is closing."""
        raise NotImplementedError

    def _parse(self, portion: bytes) -> None:
        """Parse bytes, and add to ``work`` and ``payload``."""
        raise NotImplementedError

    def pause_reading(self) -> None:
        """Read no more for now."""
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on, unless bytes wait to be parsed."""
        if not self.held:
            self.transport.resume_reading()

    def go_on(self) -> None:
        """Parse what is held from the next turn on, once the connection may have more. Until then nothing is read."""
        if self.held and not self.transport.is_closing():
            self.pause_reading()
            if self._turn is None and self._may_parse():
                self._turn = asyncio.get_running_loop().call_soon(self._parse_held)

    def forget_held(self) -> None:
        """Parse no more of what came."""
        self.held = b""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    def _parse_held(self) -> None:
        """Parse until the share of this turn is used, and read on when nothing is left."""
        self._turn = None
        most = self.work + TURN
        while self.held and self.work < most and self._may_parse():
            portion = self.held[self._start : self._start + self._portion]
            self._start += len(portion)
            if self._start >= len(self.held):
                self.held = b""
            self._parse_portion(portion)
        if self.held:
            self.go_on()
        elif not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _parse_portion(self, portion: bytes) -> None:
        before = self.work
        self._parse(portion)
        work = self.work - before
        if work > _PORTION:
            self._portion = max(len(portion) * _PORTION // work, _SMALLEST)
        elif self._portion < _LARGEST:
            self._portion *= 2

    def is_flood(self, now: float) -> bool:
        """Return True if the connection causes much work with little in it. To be asked about once a second."""
        work, payload = self.work - self._seen[0], self.payload - self._seen[1]
        much = work > MOST_PER_S * (now - self._seen_at) and payload < work * LEAST_BYTES
        self._strikes = self._strikes + 1 if much else 0
        self._seen, self._seen_at = (self.work, self.payload), now
        return self._strikes >= _PATIENCE

    # ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _enters(self, phase: tuple[str, int] | None, now: float, base: int) -> bool:
        """Begin to watch a phase. False if it is watched already."""
        if phase == self._phase:
            return False
        self._phase, self._since, self._base = phase, now, base
        return True

    def _check_reader(self, now: float) -> bool:
        """Cut a peer that does not read what it was sent. True while there is something to read."""
        if self.transport.get_write_buffer_size() == 0:
            return False
        self._note_level()
        settings = self.limits.settings
        if self._enters(("write", 0), now, self._taken):
            self._least = min(int(settings.least_rate * settings.write_timeout_s), self._level)
        elif now - self._since > settings.write_timeout_s:
            if self._taken - self._base < self._least:
                self.limits.ended["reader_too_slow"] += 1
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

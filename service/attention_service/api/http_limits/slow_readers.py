"""Connections whose peer does not read what it was sent."""

import asyncio

from attention_service.api.http_limits.connection_limits import ConnectionLimits
from attention_service.api.http_limits.descriptors import reset_at_close, unacknowledged


class Watched:
    """Everything that a connection did since the guard last saw progress."""

    transport: asyncio.Transport
    limits: ConnectionLimits
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

"""The bytes of one connection on their way to its parser, so much at a time.

Uvicorn's protocols parse all that one read brought: up to 256 KiB, which may be ten thousand heads, chunks or frames of
a few bytes. Here the parser gets a portion at a time and says how much work it made of it. Once a connection has used
its share of a turn of the event loop, the rest is held and its reading pauses until the next turn.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

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


class Reader(Protocol):
    """The side of a connection that reads."""

    def pause_reading(self) -> None:
        """Read no more for now."""

    def resume_reading(self) -> None:
        """Read on, unless something else keeps reading paused."""


class Intake:
    """The bytes of a connection that were not parsed yet. Used from the event loop only."""

    __slots__ = (
        "_at", "_feed", "_may_feed", "_portion", "_reader", "_seen", "_start", "_strikes", "_turn", "held", "payload",
        "work",
    )  # fmt: skip

    def __init__(self, reader: Reader, feed: Callable[[bytes], None], may_feed: Callable[[], bool]) -> None:
        """``feed`` parses a portion. ``may_feed`` is False while the connection has enough to do, or is closing."""
        self._reader, self._feed, self._may_feed = reader, feed, may_feed
        self.held, self._start = b"", 0
        """The bytes that came, and the place in them from which on they were not parsed."""
        self._portion = 2**14
        self._turn: asyncio.Handle | None = None
        self.work = 0
        """Work so far, which the parser's callbacks add."""
        self.payload = 0
        """Bytes of bodies and messages so far, which they add too."""
        self._seen, self._at = (0, 0), time.monotonic()
        """Both when the connection was last checked, and when that was."""
        self._strikes = 0

    def take(self, data: bytes) -> None:
        """Parse what came, now or in later turns."""
        if self.held:  # it was on its way when reading was paused
            self.held, self._start = self.held[self._start :] + data, 0
        elif len(data) <= self._portion and self._may_feed():
            self._parse(data)
        else:
            self.held, self._start = data, 0
            self._run()

    def go_on(self) -> None:
        """Parse what is held from the next turn on, once the connection may have more. Until then nothing is read."""
        if self.held:
            self._reader.pause_reading()
            if self._turn is None and self._may_feed():
                self._turn = asyncio.get_running_loop().call_soon(self._run)

    def stop(self) -> None:
        """Forget what is held."""
        self.held = b""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    def is_flood(self, now: float) -> bool:
        """Return True if the connection causes much work with little in it. To be asked about once a second."""
        work, payload = self.work - self._seen[0], self.payload - self._seen[1]
        much = work > MOST_PER_S * (now - self._at) and payload < work * LEAST_BYTES
        self._strikes = self._strikes + 1 if much else 0
        self._seen, self._at = (self.work, self.payload), now
        return self._strikes >= _PATIENCE

    def _run(self) -> None:
        """Parse until the share of this turn is used, and read on when nothing is left."""
        self._turn = None
        most = self.work + TURN
        while self.held and self.work < most and self._may_feed():
            portion = self.held[self._start : self._start + self._portion]
            self._start += len(portion)
            if self._start >= len(self.held):
                self.held = b""
            self._parse(portion)
        if self.held:
            self.go_on()
        else:
            self._reader.resume_reading()

    def _parse(self, portion: bytes) -> None:
        before = self.work
        self._feed(portion)
        work = self.work - before
        if work > _PORTION:
            self._portion = max(len(portion) * _PORTION // work, _SMALLEST)
        elif self._portion < _LARGEST:
            self._portion *= 2

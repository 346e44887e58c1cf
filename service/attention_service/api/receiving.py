"""Requests like the last one on their connection: recognized by their head, and received where they will be read.

The usual way of a body is out of the event loop's buffer, out of the parser, and together with its other pieces, which
is a copy each time. What begins as a request that is known needs no parser: its framing is known, and it can be
received into one buffer, in which its tensors then lie.
"""

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from attention_service.api.known import Known
from attention_service.runtime.scheduling.budget import Body

if TYPE_CHECKING:
    from attention_service.api.connection import Connection

_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,9})[ \t]*\r\n", re.IGNORECASE)
_DIGITS: Final = 9
_END: Final = b"\r\n\r\n"
_ALIGNED: Final = 64
"""Bytes at whose multiples a body begins, for the sake of the tensors in it."""
_ASIDE: Final = 2**16
"""Bytes that are received at a time where there is no memory for a whole request, or none can be told."""


@dataclass(frozen=True, slots=True)
class Head:
    """How the last request began, which express knew: all that came before its body, but for the body's length."""

    before: bytes
    """Up to the digits of the length."""
    after: bytes
    """And behind them."""
    known: Known

    @classmethod
    def of(cls, text: bytes, known: Known) -> Self | None:
        """The head that this text is; None where it is none, or more."""
        found = _LENGTH.search(text)
        if found is None or text.find(_END) != len(text) - len(_END):
            return None
        return cls(text[: found.start(1)], text[found.end(1) :], known)

    @property
    def longest(self) -> int:
        """Bytes of the longest such head."""
        return len(self.before) + _DIGITS + len(self.after)

    def body_in(self, data: bytes) -> tuple[int, int] | None:
        """Where the body begins in what begins with such a head, and its length; None where it doesn't."""
        if not data.startswith(self.before):
            return None
        start = len(self.before)
        end = data.find(b"\r", start, start + _DIGITS + 1)
        length = data[start:end]
        if end < 0 or not length.isdigit() or not data.startswith(self.after, end):
            return None
        return end + len(self.after), int(length)

    def may_begin(self, data: bytes) -> bool:
        """Whether such a head may begin so."""
        start = len(self.before)
        if len(data) <= start:
            return self.before.startswith(data)
        length, point, rest = data[start:].partition(b"\r")
        fits = data.startswith(self.before) and length.isdigit() and len(length) <= _DIGITS
        return fits and self.after.startswith(point + rest)


@dataclass(slots=True)
class _Coming:
    """A request that is being received."""

    buffer: memoryview
    memory: Body | None
    """What it holds; None where there was none, and only a part of it is received."""
    filled: int = 0
    body: tuple[int, int] | None = None
    """Where it begins, and its length."""


class Receiver(asyncio.BufferedProtocol):
    """Takes the place of a connection that expects large requests with one head, until something else comes."""

    def __init__(self, connection: "Connection", head: Head, size: int) -> None:
        """``size``: bytes of the last such request."""
        self.head = head
        self._connection = connection
        self._most = size + size // 32 + 1  # numbers in JSON are not all equally long; more than all of it is no end
        self._shift = -(len(head.before) + len(str(size)) + len(head.after)) % _ALIGNED
        self._coming: _Coming | None = None

    # ── what comes ───────────────────────────────────────────────────────────────────────────────────────────────────

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where to put what comes next. There is none as long as nothing comes."""
        coming = self._coming or self._begin()
        return coming.buffer[coming.filled :]

    def _begin(self) -> _Coming:
        memory = self._connection.memory(self._most)
        buffer = np.empty(_ASIDE if memory is None else self._shift + self._most, np.uint8).data
        self._coming = _Coming(buffer if memory is None else buffer[self._shift :], memory)
        return self._coming

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes came."""
        coming = self._coming or self._begin()
        self._connection.came()
        coming.filled += nbytes
        if coming.body is None:
            begin = bytes(coming.buffer[: min(coming.filled, self.head.longest)])
            coming.body = self.head.body_in(begin)
            if coming.memory is None or (coming.body is None and not self.head.may_begin(begin)):
                self.hand_back()
                return
        end = None if coming.body is None else sum(coming.body)
        if end == coming.filled and self._is_answered(coming):
            self._coming = None
        elif coming.filled == len(coming.buffer) or (end is not None and not coming.filled < end < len(coming.buffer)):
            self.hand_back()

    def _is_answered(self, coming: _Coming) -> bool:
        """Have a whole request answered; whether it is, by and by."""
        if coming.body is None:
            return False
        start, length = coming.body
        return self._connection.answers_again(self.head.known, coming.buffer[start : start + length], coming.memory)

    def hand_back(self) -> None:
        """Let the connection have what came, and what will come."""
        coming, self._coming = self._coming, None
        came = b"" if coming is None else bytes(coming.buffer[: coming.filled])
        if coming is not None and coming.memory is not None:
            coming.memory.give_back()
        del coming
        self._connection.receive_itself(came)

    # ── all else is the connection's ─────────────────────────────────────────────────────────────────────────────────

    def pause_writing(self) -> None:
        """As of any protocol."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """As of any protocol."""
        self._connection.resume_writing()

    def eof_received(self) -> None:
        """As of any protocol."""
        self.hand_back()
        self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """As of any protocol."""
        self.hand_back()
        self._connection.connection_lost(exc)

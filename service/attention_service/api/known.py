"""What is known of requests that say the same, and the body of one that may be known."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from attention_service.api.texts import Head, Text
from attention_service.runtime.operations.recurring import Recurring
from attention_service.runtime.scheduling.budget import Body
from attention_service.runtime.scheduling.passes import Ended

Headers = list[tuple[bytes, bytes]]

_LONGEST: Final = 4096
"""Bytes of a URL and of all headers, of which some are remembered."""
DECIDING: Final = frozenset({b"if-match", b"prefer", b"content-encoding", b"transfer-encoding"})
"""Headers with which a request always goes the ordinary way."""
_READ: Final = DECIDING | {b"accept", b"content-type"}
"""Headers that bear on what is answered. The others may differ from request to request, as those of tracing do."""


def read_of(url: bytes, headers: Headers) -> Headers | None:
    """The headers that bear on the answer; None where it is too much to be remembered."""
    if len(url) + sum([len(name) + len(value) for name, value in headers]) > _LONGEST:
        return None
    return [each for each in headers if each[0] in _READ]


@dataclass(eq=False, slots=True)
class Known:
    """What is known of requests that say the same, but for the numbers of their tensors."""

    key: Hashable
    url: bytes
    headers: Headers
    """Of one of them."""
    read: Headers
    """Those that bear on the answer: they are the same for all of them."""
    media_type: str
    text: Text
    recurring: Recurring
    is_small: bool
    """Whether the body of that one was not worth counting."""
    _head: Head | None = None

    def says(self, url: bytes, headers: Headers) -> bool:
        """Whether a request says the same before its body."""
        return url == self.url and (headers == self.headers or read_of(url, headers) == self.read)

    def head(self, ended: Ended) -> Head:
        """The text of the replies, made of the first of them."""
        if self._head is None:
            self._head = self.text.head(self.recurring.reply, ended)
        return self._head


class Incoming:
    """The body so far of a request that may be known."""

    __slots__ = ("_memory", "_pieces", "_stated", "known")

    def __init__(self, stated: int, memory: Body | None, known: Known | None) -> None:
        """``stated``: bytes that are to come; ``memory``: of the body, where it is counted."""
        self.known = known
        """What is known of a request that says the same before its body."""
        self._memory = memory
        self._stated = stated
        self._pieces: list[bytes] = []

    def add(self, piece: bytes) -> None:
        """What came of it. Raises what ``Body.hold`` does."""
        if self._memory is not None and not self._pieces:
            self._memory.hold(self._stated)
        self._pieces.append(piece)

    def first(self) -> bytes:
        """What came of it first."""
        return self._pieces[0] if self._pieces else b""

    def size(self) -> int:
        """Bytes that came."""
        return sum(map(len, self._pieces))

    def whole(self) -> bytes:
        """All that came; nothing more comes."""
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def read(self) -> bytes | bytearray:
        """The same, to be read as is known: where it is put together here, as what may be written to, if that helps."""
        writable = len(self._pieces) > 1 and self.known is not None and self.known.text.writes
        return bytearray().join(self._pieces) if writable else self.whole()

    def give_back(self) -> None:
        """The body is done with."""
        if self._memory is not None:
            self._memory.give_back()

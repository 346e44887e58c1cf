"""Memory that a model's process shares with its server, in which it leaves the large tensors of a reply.

Through a pipe a reply is copied twice, into memory that the system must clear first. Here a layer's weights are
computed into the memory from which the server sends them, and the same pages serve reply after reply. A process has a
few such memories: while the reply in one is sent, the next is made in another. If none is free, a reply goes through
the pipe.

Each is a file without a name. The server owns it, and cuts it when its pages are to be free; the process lengthens it,
which takes no pages. Both happen between replies only.
"""

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from math import prod
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention_service.models.worker_messages import Piece

_MIN_LEFT_BYTES: Final = 2**16
"""Bytes of a piece from which on it is left in the memory."""
_STEP_BYTES: Final = 2**12
_INLINE: Final = -1
Place = tuple[int, int]
"""The bytes of a piece of a reply, and the position in the memory at which it lies; _INLINE in the message itself."""


class ReplyMemory:
    """One memory, as the server sees it. Used from the event loop."""

    def __init__(self, on_free: Callable[[], None]) -> None:
        """``on_free`` is called, in any thread, when a reply that lay here is no longer needed."""
        self.file = os.memfd_create("attention-reply", os.MFD_CLOEXEC)
        self._on_free = on_free
        self._map: mmap.mmap | None = None
        """Kept, since each new one costs a page fault a page."""
        self._lent: weakref.ref[NDArray[np.uint8]] | None = None
        self.bytes = 0
        """Bytes of the pages that replies took. The file is not asked, for that takes a system call a request."""
        self._close_file = weakref.finalize(self, os.close, self.file)

    def close(self) -> None:
        """Give it up, once its process has ended. A reply that lies here stays until it is sent."""
        self._close_file()
        self._map = None  # it keeps the file

    @property
    def is_free(self) -> bool:
        """True if no reply that lies here is needed."""
        return self._lent is None or self._lent() is None

    def cut(self, size: int) -> None:
        """Free its pages beyond so many bytes. Only while it is free."""
        if self.bytes > size:
            self.bytes = -(-size // _STEP_BYTES) * _STEP_BYTES
            os.ftruncate(self.file, self.bytes)

    def forget(self) -> None:
        """Free the pages of a reply that was begun and never came. Only while it is free."""
        os.ftruncate(self.file, self.bytes)

    def pieces(self, places: Sequence[Place], body: memoryview) -> list[memoryview]:
        """Return the pieces of a reply. The memory is free once they are gone."""
        end = max((place + size for size, place in places if place != _INLINE), default=0)
        if not end:  # all of it came through the pipe; the file may be empty
            return pieces_of_body(places, body)
        self.bytes = max(self.bytes, -(-end // _STEP_BYTES) * _STEP_BYTES)
        if self._map is None or len(self._map) < end:
            self._map = mmap.mmap(self.file, 0, prot=mmap.PROT_READ)
        lent = np.frombuffer(self._map, np.uint8)
        self._lent = weakref.ref(lent, lambda _: self._on_free())
        return _pieces(places, body, lent.data)


def pieces_of_body(places: Sequence[Place], body: memoryview) -> list[memoryview]:
    """Return the pieces of a reply that came through the pipe alone."""
    return _pieces(places, body, memoryview(b""))


def _pieces(places: Sequence[Place], body: memoryview, memory: memoryview) -> list[memoryview]:
    pieces, start = [], 0
    for size, place in places:
        if place == _INLINE:
            pieces.append(body[start : start + size])
            start += size
        else:
            pieces.append(memory[place : place + size])
    return pieces


class ReplySpace:
    """One memory, as the model's process sees it: the space for one reply at a time."""

    def __init__(self, file: int | None) -> None:
        """``file``: None for no memory, so that all goes through the pipe."""
        self._file = file
        self._map: mmap.mmap | None = None
        self._first = self._end = 0
        """The address of its first byte, and the bytes that are taken."""

    def open(self, size: int) -> None:
        """Take it for a reply of at most so many bytes."""
        if self._file is None:
            return
        size = max(-(-size // _STEP_BYTES), 1) * _STEP_BYTES  # nothing cannot be mapped
        if self._map is None or len(self._map) < size:
            os.ftruncate(self._file, size)
            self._map = mmap.mmap(self._file, size)
            self._first = np.frombuffer(self._map, np.uint8).ctypes.data
        os.ftruncate(self._file, len(self._map))
        self._end = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return a tensor that lies here, without any numbers yet; None of a small one, or if the room is used up."""
        size = prod(shape) * dtype.itemsize
        place = self._take(size)
        if place is None or self._map is None:
            return None
        return torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=place).view(dtype).view(*shape)

    def leave(self, pieces: Sequence[Piece]) -> tuple[list[Place], list[Piece]]:
        """Return the places of the pieces of a reply, and those that go through the pipe. Others are copied to here."""
        places: list[Place] = []
        inline: list[Piece] = []
        for piece in pieces:
            place = None if len(piece) < _MIN_LEFT_BYTES else self._place_of(piece)
            places.append((len(piece), _INLINE if place is None else place))
            if place is None:
                inline.append(piece)
        return places, inline

    def _take(self, size: int) -> int | None:
        if self._map is None or size < _MIN_LEFT_BYTES or self._end + size > len(self._map):
            return None
        place, self._end = self._end, -(-(self._end + size) // 64) * 64
        return place

    def _place_of(self, piece: Piece) -> int | None:
        if self._map is None:
            return None
        place = int(np.frombuffer(piece, np.uint8).ctypes.data) - self._first
        if 0 <= place < self._end:
            return place
        taken = self._take(len(piece))
        if taken is not None:
            self._map[taken : taken + len(piece)] = piece
        return taken

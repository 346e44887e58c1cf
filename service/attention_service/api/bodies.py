"""Bodies as they arrive: into one buffer, decompressed where they are compressed, within the limit and the memory."""

import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive

from attention_contract.errors import BodyTooLarge, Unreadable, UnsupportedMediaType
from attention_service.api.leaving import unless_gone
from attention_service.runtime.scheduling.budget import Body

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

UNCOUNTED: Final = 32 * 1024
"""Bytes of a body that are not worth counting."""
_COPIED: Final = 2**16
"""Up to this size a copy that may be written to, as tensors want it, costs less than to do without."""
_STEP: Final = 2**20
"""Bytes that are decompressed at a time: between two steps they are counted, and others have their turn."""
_PAGE: Final = 2**21
"""Bytes of a body for which memory is taken at a time: a page of the system may be as large."""
_SLICE: Final = 2**16
"""Bytes of a compressed body that are looked at at a time."""
_MOST_MEMBERS: Final = 1024
"""Of a gzip file, or frames of zstd: each costs something to begin, also where there is nothing in it."""
_WINDOW: Final = 27
"""The largest window of zstd that is read, as a power of 2 (RFC 8878 recommends 8 MiB; ``zstd --long`` takes this)."""


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, limit: int, memory: Body) -> memoryview:
    """The whole body in one buffer, as it was before it was compressed.

    It is read and decompressed only as long as it stays within the limit and there is memory for it. Raises
    UnsupportedMediaType, BodyTooLarge, Unreadable, Cancelled, or what ``memory`` does.
    """
    coding = str(headers.get(b"content-encoding", b"identity"), "latin-1").strip().lower()
    if coding not in {"identity", *_CODINGS}:
        raise UnsupportedMediaType(
            f"Content-Encoding: {coding[:40]!r} is not read here; send the body as it is, or in one of "
            f"{', '.join(_CODINGS)}",
            offered=list(_CODINGS),
        )
    room = _Room(limit, memory)
    body = await _received(headers, receive, room)
    return body if coding == "identity" else await unless_gone(receive, _decompressed(body, coding, room))


class _Room:
    """What a body may take up: bytes of one buffer up to the limit, all of them counted."""

    def __init__(self, limit: int, memory: Body) -> None:
        self.limit = limit
        self._memory = memory
        self._taken = self._held = 0

    def expect(self, size: int) -> None:
        """Raise what is raised for a body of so many bytes, of which none has come yet."""
        if size > UNCOUNTED or size > self.limit:
            self._check(size)
            self._memory.expect(size)

    def take(self, more: int, size: int, stated: int = 0) -> None:
        """Take so many bytes more for a buffer that then has this size, and is to have the one stated."""
        self._check(size)
        self._taken += more
        if self._taken > max(self._held, UNCOUNTED):
            ahead = min(max(stated - size, 0), _PAGE)
            self._memory.hold(self._taken + ahead - self._held)
            self._held = self._taken + ahead

    def _check(self, size: int) -> None:
        if size > self.limit:
            raise BodyTooLarge(
                f"the body has at least {size} bytes; this server reads up to {self.limit}",
                limit_bytes=self.limit,
                needed_bytes=size,
            )


async def _received(headers: Mapping[bytes, bytes], receive: Receive, room: _Room) -> memoryview:
    """The body as it came: the one message that it came in, or its chunks, each copied once.

    What is stated is refused at once where it is too much, but takes up memory only as it comes: of a buffer of that
    size, the system gives a page when it is written to. One that grows would be moved again and again.
    """
    stated = int(headers.get(b"content-length", 0))
    room.expect(stated)
    body: bytearray | memoryview = bytearray() if stated <= _COPIED else np.empty(stated, np.uint8).data
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Unreadable("the body ended before it was complete")
        chunk, last = message.get("body", b""), not message.get("more_body")
        end = size + len(chunk)
        room.take(len(chunk), end, stated)
        if last and not size and len(chunk) > _COPIED:
            return memoryview(chunk)
        if stated and end > stated:
            raise Unreadable(f"the body has more than the {stated} bytes that its Content-Length says")
        body[size:end] = chunk
        size = end
        if last:
            return memoryview(body)[:size]


async def _decompressed(body: memoryview, coding: str, room: _Room) -> memoryview:
    steps, whole = _CODINGS[coding](body), bytearray()
    while True:
        piece = await run_in_threadpool(next, steps, None)
        if piece is None:
            return memoryview(whole)
        room.take(len(piece), len(whole) + len(piece))
        whole += piece


def _gunzip(body: memoryview) -> Iterator[bytes]:
    at = members = 0
    while at < len(body):
        members += 1
        if members > _MOST_MEMBERS:
            raise _broken("gzip")
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        while not member.eof:
            given = body[at : at + _SLICE]  # what is not consumed is copied, so it is given little at a time
            try:
                piece = member.decompress(given, _STEP)
            except zlib.error:
                raise _broken("gzip") from None
            at += len(given) - len(member.unconsumed_tail) - len(member.unused_data)
            if piece:
                yield piece
            elif not given and not member.eof:
                raise _broken("gzip")


def _unzstd(body: memoryview) -> Iterator[bytes]:
    at = frames = 0
    while at < len(body):
        frames += 1
        if frames > _MOST_MEMBERS:
            raise _broken("zstd")
        frame = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW})
        while not frame.eof:
            given = body[at : at + _SLICE] if frame.needs_input else b""
            if frame.needs_input and not given:
                raise _broken("zstd")
            try:
                piece = frame.decompress(given, _STEP)
            except zstd.ZstdError:
                raise _broken("zstd") from None
            at += len(given)
            if piece:
                yield piece
        at -= len(frame.unused_data)


def _broken(coding: str) -> Unreadable:
    return Unreadable(f"the body is not what Content-Encoding: {coding} says, or not all of it")


_CODINGS: Final = {"gzip": _gunzip, "zstd": _unzstd}
"""The content codings that are read, and what takes them apart step by step."""

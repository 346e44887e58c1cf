"""Request bodies: received into one buffer, decompressed, parsed; within the limits and the memory budget."""

import math
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TypeVar

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope

from attention_contract.base import WireModel
from attention_contract.errors import BodyTooLarge, InvalidRequest, Unreadable, UnsupportedMediaType
from attention_contract.json_reading import TextSize, check_text, measure_text
from attention_contract.operations import Operation
from attention_contract.validation import clip, validate
from attention_contract.wire import JSON, SAFETENSORS, from_body
from attention_service.api.bodies.forms import FORM, read_form
from attention_service.api.bodies.negotiation import content_type
from attention_service.api.disconnection import unless_gone
from attention_service.api.http_limits.connection_limits import LATE
from attention_service.api.request_head import MAX_HEADER_BYTES, Headers
from attention_service.runtime.request_timing import note, note_bytes
from attention_service.runtime.scheduling.budget import UNCOUNTED, BodyMemory
from attention_service.settings import Settings

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ReadT = TypeVar("ReadT")
_INLINE_HEADER: Final = 2**16
"""Largest header in bytes of a safetensors file that is read on the event loop; a thread reads others."""
_INLINE_TEXT: Final = 2**16
"""Largest JSON in bytes that is parsed on the event loop, whatever its content."""
_INLINE_NUMBERS: Final = 2**19
_INLINE_PARTS: Final = 2**12
"""Limits for larger JSON with few lists and strings, which parse slower than numbers: bytes, and their number."""
_COPIED: Final = 2**16
"""Up to this size a body is copied into a writable buffer, which torch prefers."""
_BYTES_AT_ONCE: Final = 2**20
"""Bytes that are decompressed at a time. Between two steps they are counted, and other requests run."""
_PAGE: Final = 2**21
"""Bytes of a body for which memory is taken at a time, the size of a huge page."""
_SLICE: Final = 2**16
"""Bytes of a compressed body that are given to the decompressor at a time."""
_UNCHECKED: Final = 2**23
"""Decompressed bytes up to which the ratio of compression is not checked."""
_FORM_COPIES: Final = 4
"""Times that the file of a form is in memory at once: as it came, as parts, as bytes, and as base64."""
_MOST_MEMBERS: Final = 1024
"""Members of a gzip or zlib stream, or frames of zstd. Each costs time, even an empty one."""
_WINDOW: Final = 27
"""The largest window of zstd, as a power of 2: that of ``zstd --long`` (RFC 8878 recommends 8 MiB)."""


async def read_request(
    scope: Scope, headers: Headers, receive: Receive, operation: Operation[Any], settings: Settings, memory: BodyMemory
) -> Any:
    """The request in a body, or in the query string of a GET; None for an operation without one.

    Raises UnsupportedMediaType, BodyTooLarge, Unreadable, an InvalidRequest that names the field at fault, or what
    ``memory`` raises.
    """
    model = operation.request
    if model is None:
        return None
    if operation.method == "GET":
        return validate(model, query_of(scope), by_name=False)
    media_type = content_type(headers)
    is_form = media_type == FORM and operation.form
    if media_type != JSON and not is_form and not (media_type == SAFETENSORS and operation.tensors):
        offered = [JSON, *([SAFETENSORS] if operation.tensors else []), *([FORM] if operation.form else [])]
        came = f"{media_type[:80]!r} is not read here" if media_type else "the header is missing"
        raise UnsupportedMediaType(f"Content-Type: {came}; expected {' or '.join(offered)}", offered=offered)
    limit = settings.max_body_bytes
    if media_type == JSON:
        limit = min(limit, settings.max_json_bytes)
    body = await read_body(headers, receive, limit, memory, settings.max_compression_ratio, scope.get("state", {}))

    if is_form:
        memory.hold(_FORM_COPIES * len(body))
        fields = await run_in_threadpool(read_form, body, headers[b"content-type"], model)
        return validate(model, fields, by_name=False)

    def read(body: memoryview, size: TextSize | None) -> WireModel:
        return from_body(model, body, media_type, "request", size)

    return await parsed(body, read, media_type, settings, memory)


async def parsed(
    body: memoryview, read: Callable[[memoryview, TextSize | None], ReadT], media_type: str, settings: Settings,
    memory: BodyMemory,
) -> ReadT:  # fmt: skip
    """A body, or a message of a stream, as ``read`` makes it of its bytes and of the size of its text, if it is JSON.

    A thread reads what takes long. Raises what ``read`` and ``memory`` raise, and BodyTooLarge for a text with more
    values than the settings allow, which is refused before it is parsed.
    """
    began, size = time.monotonic(), None
    if media_type == JSON:
        inline = len(body) <= _INLINE_NUMBERS
        size = measure_text(body) if inline else await run_in_threadpool(measure_text, body)
        check_text(size, settings.max_json_values)
        if size.parsed_bytes > UNCOUNTED:
            memory.hold(size.parsed_bytes)
        inline = inline and _is_quickly_parsed(size)
    else:
        inline = int.from_bytes(body[:8], "little") <= _INLINE_HEADER
    request = read(body, size) if inline else await run_in_threadpool(read, body, size)
    note("decode", began)
    return request


def _is_quickly_parsed(size: TextSize) -> bool:
    return size.characters <= _INLINE_TEXT or size.lists + size.quotes <= _INLINE_PARTS


def query_of(scope: Scope) -> dict[str, str]:
    """The parameters of the query string. Raises InvalidRequest for one that is too long or comes twice."""
    text = scope["query_string"]
    if len(text) > MAX_HEADER_BYTES:
        raise InvalidRequest(
            f"the query has {len(text)} bytes; expected at most {MAX_HEADER_BYTES}", limit=MAX_HEADER_BYTES
        )
    values = QueryParams(text).multi_items()
    for name, count in Counter(name for name, _ in values).items():
        if count > 1:
            raise InvalidRequest.at(clip(name), "it came more than once; send it once")
    return dict(values)


async def read_body(
    headers: Headers, receive: Receive, limit: int, memory: BodyMemory, ratio: float = math.inf,
    state: Mapping[str, Any] = MappingProxyType({}),
) -> memoryview:  # fmt: skip
    """The whole body in one buffer, decompressed to at most ``ratio`` times its bytes.

    Reading stops as soon as the body exceeds a limit or the memory, or the guard gives it up in the ``state`` of its
    request. Raises UnsupportedMediaType, BodyTooLarge, TooSlow, Draining, Unreadable, Cancelled, or what ``memory``
    raises.
    """
    if (framing := headers.get(b"transfer-encoding")) is not None and framing.strip().lower() != b"chunked":
        raise Unreadable(
            f"Transfer-Encoding: {str(framing[:40], 'latin-1')!r} is not supported; expected chunked. Name a "
            "compression in Content-Encoding"
        )
    coding = str(headers.get(b"content-encoding") or b"identity", "latin-1").strip().lower()
    if coding != "identity" and coding not in _CODINGS:
        raise UnsupportedMediaType(
            f"Content-Encoding: {coding[:40]!r} is not supported; send the body uncompressed, or in one of "
            f"{', '.join(_CODINGS)}",
            offered=list(_CODINGS),
        )
    allowance, began = _Allowance(limit, memory), time.monotonic()
    body = await _received(headers, receive, allowance, state)
    note_bytes(len(body))
    if coding != "identity":
        body = await unless_gone(receive, _decompressed(body, coding, allowance, ratio))
    note("read", began)
    return body


class _Allowance:
    """The bytes that one body may take: up to the limit, and counted in the budget."""

    def __init__(self, limit: int, memory: BodyMemory) -> None:
        self.limit = limit
        self._memory = memory
        self._taken = self._held = 0

    def expect(self, size: int) -> None:
        """Refuse a body whose stated size is too much, before any of it has come."""
        if size > self.limit:
            raise self._too_large(size)
        if size > UNCOUNTED:
            self._memory.expect(size)

    def take(self, more: int, size: int, stated: int = 0) -> None:
        """Count more bytes, of a buffer that then has this size and will have the stated one."""
        if size > self.limit:
            raise self._too_large(size)
        self._taken += more
        if self._taken > max(self._held, UNCOUNTED):
            ahead = min(max(stated - size, 0), _PAGE)
            self._memory.hold(self._taken + ahead - self._held)
            self._held = self._taken + ahead

    def _too_large(self, size: int) -> BodyTooLarge:
        return BodyTooLarge(
            f"the body has at least {size} bytes; this server reads up to {self.limit}",
            limit_bytes=self.limit,
            needed_bytes=size,
        )


async def _received(headers: Headers, receive: Receive, allowance: _Allowance, state: Mapping[str, Any]) -> memoryview:
    """The body as it was sent: the one message that carried it, or a buffer into which each chunk is copied once.

    The buffer has the stated size from the start. The system gives it memory only as it is written to.
    """
    length = headers.get(b"content-length", b"0")
    if not length.isdigit():
        raise Unreadable("Content-Length: expected one number of bytes")
    stated = int(length)
    allowance.expect(stated)
    body: bytearray | memoryview = bytearray() if stated <= _COPIED else np.empty(stated, np.uint8).data
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Unreadable("the body ended before it was complete")
        chunk, last = message.get("body", b""), not message.get("more_body")
        if not last and LATE in state:
            raise state[LATE]
        end = size + len(chunk)
        allowance.take(len(chunk), end, stated)
        if last and not size and len(chunk) > _COPIED:
            return memoryview(chunk)
        if stated and end > stated:
            raise Unreadable(f"the body has more than the {stated} bytes that its Content-Length says")
        body[size:end] = chunk
        size = end
        if last:
            return memoryview(body)[:size]


async def _decompressed(body: memoryview, coding: str, allowance: _Allowance, ratio: float) -> memoryview:
    steps, whole = _CODINGS[coding](body), bytearray()
    while True:
        read, piece = await run_in_threadpool(next, steps, (0, None))
        if piece is None:
            return memoryview(whole)
        size = len(whole) + len(piece)
        if size > max(_UNCHECKED, ratio * read):
            raise BodyTooLarge(
                f"{read} bytes of the body decompressed to {size}; max_compression_ratio allows a factor of {ratio:g}. "
                "Send the body with less compression or with none",
                limit=ratio,
                actual=round(size / read, 1),
            )
        allowance.take(len(piece), size)
        whole += piece


def _inflate(body: memoryview, coding: str, wbits: int) -> Iterator[tuple[int, bytes]]:
    """Yield the pieces of the content, each with the number of bytes that were read so far."""
    at = members = 0
    while at < len(body):
        members += 1
        if members > _MOST_MEMBERS:
            raise _broken(coding)
        member = zlib.decompressobj(wbits=wbits)
        while not member.eof:
            given = body[at : at + _SLICE]  # what is not consumed is copied, so it is given little at a time
            try:
                piece = member.decompress(given, _BYTES_AT_ONCE)
            except zlib.error:
                raise _broken(coding) from None
            at += len(given) - len(member.unconsumed_tail) - len(member.unused_data)
            if piece:
                yield at, piece
            elif not given and not member.eof:
                raise _broken(coding)


def _unzstd(body: memoryview) -> Iterator[tuple[int, bytes]]:
    """Yield the pieces of the content, each with the number of bytes that were read so far."""
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
                piece = frame.decompress(given, _BYTES_AT_ONCE)
            except zstd.ZstdError:
                raise _broken("zstd") from None
            at += len(given)
            if piece:
                yield at, piece
        at -= len(frame.unused_data)


def _broken(coding: str) -> Unreadable:
    return Unreadable(f"the body is not valid or not complete for Content-Encoding: {coding}")


_CODINGS: Final[dict[str, Callable[[memoryview], Iterator[tuple[int, bytes]]]]] = {
    "gzip": partial(_inflate, coding="gzip", wbits=zlib.MAX_WBITS | 16),
    "deflate": partial(_inflate, coding="deflate", wbits=zlib.MAX_WBITS),
    "zstd": _unzstd,
}
"""The content codings that are read, and what takes them apart step by step."""

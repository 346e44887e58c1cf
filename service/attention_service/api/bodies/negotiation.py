"""The media types that the two sides agree on, the headers that say so, and replies as responses."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

import mimeparse
import numpy as np
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from attention_contract.errors import Cancelled, HeadTooLarge, InvalidRequest, NotAcceptable
from attention_contract.json_writing import json_pieces, to_json
from attention_contract.operations import Operation
from attention_contract.tensor_files import to_safetensors
from attention_contract.tensors import Encoding
from attention_contract.wire import JSON, PICTURES, SAFETENSORS
from attention_service.api.bodies.pictures import check_drawable
from attention_service.api.disconnection import unless_gone
from attention_service.runtime.request_timing import note
from attention_service.settings import Settings

Headers = Mapping[bytes, bytes]
"""Headers by their name in lower case. Of a repeated header that is no list, the first counts."""
HEADERS: Final = "attention.headers"
"""The entry of the ASGI scope with all headers by name; of a repeated one, the last."""
_LISTS = frozenset({b"accept", b"content-encoding", b"if-match", b"if-none-match", b"prefer"})
"""Headers that are lists: repeated lines are joined with commas (RFC 9110, section 5.3)."""
_WAIT = re.compile(rb"(?:^|[,;\s])wait\s*=\s*(\d{1,9}(?:\.\d{1,9})?)\s*(?:$|[,;])", re.IGNORECASE)
INLINE_TENSOR_BYTES = 2**18
"""Largest tensors in bytes that are written as JSON on the event loop; a thread writes larger ones."""
STREAMED_TENSOR_BYTES = 2**20
"""Largest tensors in bytes whose JSON is made at once; that of larger ones is made while it is sent."""
_STREAM_BYTES = 2**22
"""Bytes that a streamed JSON reply holds at most beside its tensors."""
_JOINED_BYTES = 2**16
"""Up to this size a copy costs less than another message. Uvicorn holds as many bytes of a response that has ended."""
_PART_BYTES = 2**18
"""Bytes of a message of a large reply."""
BODY_VIEWS = "attention.body_views"
"""The ASGI extension of a server that takes memoryviews for bodies; others ask for bytes, which are a copy."""
MAX_HEADER_BYTES = 2**14
"""Bytes of one header, and of a query string."""


def check_head(headers: Sequence[tuple[bytes, bytes]], target_bytes: int, settings: Settings) -> None:
    """Raise HeadTooLarge for more headers, or more bytes with the target of the request, than the settings allow."""
    if len(headers) > settings.max_headers:
        raise HeadTooLarge(
            f"the head has {len(headers)} headers; max_headers allows {settings.max_headers}",
            limit=settings.max_headers,
            actual=len(headers),
        )
    size = target_bytes + sum([len(name) + len(value) + 4 for name, value in headers])
    if size > settings.max_head_bytes:
        raise too_large(size, settings)


def too_large(size: int, settings: Settings) -> HeadTooLarge:
    """The error of a head that has at least ``size`` bytes."""
    return HeadTooLarge(
        f"the head has at least {size} bytes; max_head_bytes allows {settings.max_head_bytes}",
        limit_bytes=settings.max_head_bytes,
        needed_bytes=size,
    )


def headers_of(scope: Scope) -> Headers:
    """The headers of a request. Raises InvalidRequest for one that is too long."""
    lines = scope["headers"]
    found: dict[bytes, bytes] = scope.get(HEADERS) or dict(lines)
    if len(found) < len(lines):
        found = dict(reversed(lines))
        for name in _LISTS & found.keys():
            found[name] = b", ".join(value for other, value in lines if other == name)
    if (size := max(map(len, found.values()), default=0)) > MAX_HEADER_BYTES:
        longest = str(max(found, key=lambda each: len(found[each]))[:80], "latin-1")
        raise InvalidRequest.at(
            longest, f"the header has {size} bytes; expected at most {MAX_HEADER_BYTES}", limit=MAX_HEADER_BYTES
        )
    return found


def header(headers: Headers, name: bytes) -> str | None:
    """The value of one header."""
    value = headers.get(name)
    return None if value is None else str(value, "latin-1")


def wait(headers: Headers, default: float | None = None) -> float | None:
    """Seconds that the caller is prepared to wait, by the preference of RFC 7240, section 4.3, with decimals.

    The default without such a preference, or with one that cannot be read.
    """
    preferences = headers.get(b"prefer")
    found = None if preferences is None else _WAIT.search(preferences)
    return default if found is None else float(found[1])


def accepted(headers: Headers, operation: Operation[Any]) -> str:
    """The media type of the reply. Raises NotAcceptable if the caller takes none of those offered.

    Without a preference, a reply with tensors has the form of the request.
    """
    sent = content_type(headers) if operation.tensors else JSON
    best = _best(headers.get(b"accept") or b"*/*", operation.tensors, bool(operation.pictures), sent == SAFETENSORS)
    if best in PICTURES:
        check_drawable(best)
    return best


@lru_cache(maxsize=256)
def _best(accept: bytes, tensors: bool, pictures: bool, as_tensors: bool) -> str:
    wanted, offered = str(accept, "latin-1"), [JSON, SAFETENSORS] if tensors else [JSON]
    if as_tensors:
        offered.reverse()
    offered += PICTURES if pictures else ()
    try:
        # mimeparse takes the last of equals.
        best = mimeparse.best_match(offered[::-1], wanted.lower())  # case does not count (RFC 9110, section 8.3.1)
    except (mimeparse.MimeTypeParseException, ValueError):
        best = ""
    if not best:
        raise NotAcceptable(
            f"Accept: {wanted[:80]!r} allows no media type of this reply; expected {' or '.join(offered)}",
            offered=offered,
        )
    return str(best)


def content_type(headers: Headers) -> str:
    """The body's media type, without its parameters; empty if the header is missing."""
    return _media_type(headers.get(b"content-type", b""))


@lru_cache(maxsize=256)
def _media_type(value: bytes) -> str:
    return str(value, "latin-1").partition(";")[0].strip().lower()


async def render(
    model: Any, media_type: str, *, encoding: Encoding = "list", status: int = 200, headers: Mapping[str, str]
) -> Response:
    """The response that carries a reply: a model, or as JSON also a value of mappings, lists and arrays."""
    began = time.monotonic()
    size = 0 if media_type == SAFETENSORS else tensor_bytes(model)
    if size > STREAMED_TENSOR_BYTES:
        return StreamedReply(json_pieces(model, encoding), size + _STREAM_BYTES, media_type, status, headers)
    pieces = await pieces_of(model, media_type, encoding, size)
    note("encode", began)
    return Reply(pieces, media_type, status, headers)


async def pieces_of(model: Any, media_type: str, encoding: Encoding, size: int) -> Sequence[bytes | memoryview]:
    """The pieces of a reply's body. A thread writes tensors of a large ``size`` in bytes as JSON."""
    if media_type == SAFETENSORS:
        return to_safetensors(model, "reply")
    if size <= INLINE_TENSOR_BYTES:
        return [to_json(model, encoding)]
    return [await run_in_threadpool(to_json, model, encoding)]


def tensor_bytes(value: Any) -> int:
    """Bytes of the tensors of a reply."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, BaseModel):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(tensor_bytes, value)) if isinstance(value, list) else 0


class Reply(Response):
    """A response whose body is sent part by part from the memory of its tensors; a small one is one message.

    A part is sent when the caller has read most of the part before it, so that the response ends when it is read.
    """

    background = None

    def __init__(
        self, pieces: Sequence[bytes | memoryview], media_type: str, status: int, headers: Mapping[str, str]
    ) -> None:
        self.held_bytes = length = sum(map(len, pieces))
        self.pieces = [b"".join(pieces)] if length <= _JOINED_BYTES else pieces
        self.status_code = status
        self.raw_headers = [(b"content-type", media_type.encode()), (b"content-length", b"%d" % length)]
        self.raw_headers += [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head, then every part."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if len(self.pieces) == 1 and len(self.pieces[0]) <= _JOINED_BYTES:
            await send({"type": "http.response.body", "body": self.pieces[0]})
            return
        views = BODY_VIEWS in scope.get("extensions", ())
        for part in _parts(self.pieces):
            await send({"type": "http.response.body", "body": part if views else bytes(part), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _parts(pieces: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the pieces in parts. The last part is one that the server may hold."""
    rest, tail = [memoryview(piece) for piece in pieces], b""
    while rest and len(tail) < _JOINED_BYTES:
        last = rest.pop()
        cut = max(len(last) + len(tail) - _JOINED_BYTES, 0)
        tail = bytes(last[cut:]) + tail
        rest += [last[:cut]] if cut else []
    for piece in rest:
        for start in range(0, len(piece), _PART_BYTES):
            yield piece[start : start + _PART_BYTES]
    yield tail


class StreamedReply(Response):
    """A response whose body is made piece by piece, each when the caller has read most of the piece before it."""

    background = None

    def __init__(
        self, pieces: Iterator[bytes], held_bytes: int, media_type: str, status: int, headers: Mapping[str, str]
    ) -> None:
        self._pieces = pieces
        self.held_bytes = held_bytes
        self.status_code = status
        self.raw_headers = [(b"content-type", media_type.encode())]
        self.raw_headers += [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head, then every piece, unless the caller goes away."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with suppress(Cancelled):
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        while (piece := await run_in_threadpool(next, self._pieces, None)) is not None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

"""The media types that the two sides agree on, and replies as responses."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import mimeparse
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from attention_contract.errors import Cancelled, NotAcceptable
from attention_contract.json_writing import AT_ONCE, json_pieces, tensor_bytes, to_json
from attention_contract.operations import Operation
from attention_contract.tensor_files import to_safetensors
from attention_contract.tensors import Encoding
from attention_contract.wire import JSON, PICTURES, SAFETENSORS, TABLES
from attention_service.api.bodies.pictures import check_drawable
from attention_service.api.bodies.table_replies import check_writable
from attention_service.api.disconnection import unless_gone
from attention_service.api.http_limits.connection_limits import BODY_VIEWS
from attention_service.api.request_head import Headers
from attention_service.models.server.model_question import WrittenReply
from attention_service.runtime.request_timing import note

INLINE_TENSOR_BYTES = 2**18
"""Largest tensors in bytes that are written as JSON on the event loop; a thread writes larger ones."""
_STREAM_BYTES = 2**22
"""Bytes that a streamed JSON reply holds at most beside its tensors."""
_JOINED_BYTES = 2**16
"""Up to this size a copy costs less than another message. Uvicorn holds as many bytes of a response that has ended."""
_PART_BYTES = 2**18
"""Bytes of a message of a large reply."""


def accepted(headers: Headers, operation: Operation[Any]) -> str:
    """The media type of the reply. Raises NotAcceptable if the caller takes none of those offered.

    Without a preference, a reply with tensors has the form of the request. A stream of events has the form that its
    request asks for, whichever form of that operation the caller names.
    """
    sent = content_type(headers) if operation.tensors else JSON
    accept = headers.get(b"accept") or b"*/*"
    more = (*(PICTURES if operation.pictures else ()), *(TABLES if operation.tables else ()), *operation.chosen)
    best = _best(accept, operation.tensors, sent == SAFETENSORS, more)
    if best in PICTURES:
        check_drawable(best)
    if best in TABLES:
        check_writable(best)
    return best


@lru_cache(maxsize=256)
def _best(accept: bytes, tensors: bool, as_tensors: bool, more: tuple[str, ...]) -> str:
    wanted, offered = str(accept, "latin-1"), [JSON, SAFETENSORS] if tensors else [JSON]
    if as_tensors:
        offered.reverse()
    offered += more
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
    """The response that carries a reply: a model, or as JSON also a value of mappings, lists and arrays.

    The reply of a whole model may be written already, and is passed on unread.
    """
    if isinstance(model, WrittenReply):
        return Reply(model.pieces, media_type, status, headers)
    began = time.monotonic()
    size = 0 if media_type == SAFETENSORS else tensor_bytes(model)
    if size > AT_ONCE:
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

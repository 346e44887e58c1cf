"""Bytes to requests and replies to bytes, in the media types that the two sides agree on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import mimeparse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from attention_contract.errors import BodyTooLarge, InvalidRequest, NotAcceptable, Unreadable, UnsupportedMediaType
from attention_contract.operations import Operation
from attention_contract.tensors import Encoding
from attention_contract.validation import validate
from attention_contract.wire import JSON, PICTURES, SAFETENSORS, from_body, to_body
from attention_service.api.pictures import check_drawable

ModelT = TypeVar("ModelT", bound=BaseModel)
_INLINE_BYTES = 32 * 1024
"""Bodies up to this size are read where they arrive, and not worth counting. Handing a larger one to a thread keeps the
event loop free."""
Hold = Callable[[int], None]
"""Takes the memory of so many bytes of a body, or raises."""


def accepted(request: Request, operation: Operation[Any]) -> str:
    """The media type of the reply. Raises NotAcceptable where there is none to agree on.

    Without a preference, a reply that carries tensors comes in the form of the request.
    """
    offered = [JSON, SAFETENSORS] if operation.tensors else [JSON]
    offered += PICTURES if operation.pictures else ()
    if operation.tensors and content_type(request) == SAFETENSORS:
        offered.reverse()
    wanted = request.headers.get("accept") or "*/*"
    try:
        # mimeparse takes the last of equals.
        best = mimeparse.best_match(offered[::-1], wanted)
    except (mimeparse.MimeTypeParseException, ValueError):
        best = ""
    if not best:
        raise NotAcceptable(
            f"Accept: {wanted[:80]!r} leaves no form for this reply; expected {' or '.join(offered)}", offered=offered
        )
    check_drawable(str(best))
    return str(best)


def content_type(request: Request) -> str:
    """The body's media type, without its parameters; JSON where none is stated."""
    return request.headers.get("content-type", JSON).partition(";")[0].strip().lower() or JSON


async def read(request: Request, operation: Operation[Any], model: type[ModelT], limit: int, hold: Hold) -> ModelT:
    """The request that the body (of a GET: the query string) holds.

    Raises UnsupportedMediaType, BodyTooLarge, Unreadable, an InvalidRequest that names the field at fault, or what
    ``hold`` does.
    """
    if operation.method == "GET":
        return validate(model, _query(request), by_name=False)
    media_type = content_type(request)
    offered = [JSON, SAFETENSORS] if operation.tensors else [JSON]
    if media_type not in offered:
        raise UnsupportedMediaType(
            f"Content-Type: {media_type[:80]!r} is not read here; expected {' or '.join(offered)}", offered=offered
        )
    if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise UnsupportedMediaType(f"Content-Encoding: {coding[:40]!r} is not read here; send the body as it is")
    body = await _body(request, limit, hold)
    if len(body) <= _INLINE_BYTES:
        return from_body(model, body, media_type, "request")
    return await run_in_threadpool(from_body, model, body, media_type, "request")


def _query(request: Request) -> dict[str, str]:
    values = request.query_params.multi_items()
    names = [name for name, _ in values]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"{name}: it came more than once; send it once", param=name)
    return dict(values)


async def _body(request: Request, limit: int, hold: Hold) -> memoryview:
    """The whole body in one buffer, read only as long as it stays within the limit and there is memory for it."""
    held = 0

    def take(size: int) -> None:
        nonlocal held
        if size > limit:
            raise _too_large(size, limit)
        if size > max(held, _INLINE_BYTES):
            hold(size - held)
            held = size

    take(int(request.headers.get("content-length", 0)))
    body = bytearray()
    try:
        async for chunk in request.stream():
            take(len(body) + len(chunk))
            body += chunk
    except ClientDisconnect:
        raise Unreadable("the body ended before it was complete") from None
    return memoryview(body)


def _too_large(size: int, limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body has at least {size} bytes; this server reads up to {limit}", limit_bytes=limit, needed_bytes=size
    )


async def render(
    model: BaseModel, media_type: str, *, encoding: Encoding = "list", status: int = 200, headers: Mapping[str, str]
) -> Response:
    """The response that carries a reply."""
    if media_type == SAFETENSORS:  # the tensors' own memory: nothing to convert
        pieces = to_body(model, media_type, "reply")
    else:
        pieces = await run_in_threadpool(to_body, model, media_type, "reply", encoding)
    return PiecewiseResponse(pieces, media_type, status, headers)


class PiecewiseResponse(Response):
    """A response whose body is sent piece by piece, as it lies in memory."""

    def __init__(
        self, pieces: Sequence[bytes | memoryview], media_type: str, status: int, headers: Mapping[str, str]
    ) -> None:
        self._pieces = pieces
        length = sum(map(len, pieces))
        super().__init__(None, status, {**headers, "content-length": str(length)}, media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head, then every piece."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

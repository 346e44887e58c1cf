"""Bytes to requests and replies to bytes, in the media types that the two sides agree on."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import mimeparse
import numpy as np
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from attention_contract.errors import InvalidRequest, NotAcceptable, UnsupportedMediaType
from attention_contract.forms import Forms
from attention_contract.operations import Operation
from attention_contract.tensors import Encoding
from attention_contract.validation import clip, validate
from attention_contract.wire import JSON, PICTURES, SAFETENSORS, from_body, to_body
from attention_service.api.bodies import read_body
from attention_service.api.pictures import check_drawable
from attention_service.runtime.scheduling.budget import Body

ModelT = TypeVar("ModelT", bound=BaseModel)
Headers = Mapping[bytes, bytes]
"""The headers of a request by their name in small letters; of those that came more than once and are no lists, the
first."""
_LISTS = frozenset({b"accept", b"content-encoding", b"if-match", b"if-none-match", b"prefer"})
"""Headers that are lists: several lines of one name are the same as one with commas (RFC 9110, section 5.3)."""
_WAIT = re.compile(rb"(?:^|[,;\s])wait\s*=\s*(\d{1,9}(?:\.\d{1,9})?)\s*(?:$|[,;])")
_INLINE_BYTES = 2**20
"""JSON of up to so many bytes is read and written where it arrives: that takes a few milliseconds, for most of which no
other thread could run. What is larger is handed to a thread, so that others get their turn between its steps."""
_FEW_BYTES = 2**16
"""Any text of so many bytes is read where it arrives, …"""
_FEW_ROWS = 2**12
"""… a longer one if it has no more lists and strings than this, which take longer to read than numbers."""


MOST_HEADER_BYTES = 2**14
"""Of one header, and of a query: longer ones take long to understand, and are nothing to remember."""


def headers_of(scope: Scope) -> Headers:
    """The headers of a request; lists that came in several lines, as one. Raises InvalidRequest for one too long."""
    lines = scope["headers"]
    found = dict(lines)
    if len(found) < len(lines):
        found = dict(reversed(lines))
        for name in _LISTS & found.keys():
            found[name] = b", ".join(value for other, value in lines if other == name)
    for name, value in found.items():
        if len(value) > MOST_HEADER_BYTES:
            raise InvalidRequest(
                f"{str(name[:80], 'latin-1')}: the header has {len(value)} bytes; expected at most {MOST_HEADER_BYTES}",
                param=str(name[:80], "latin-1"),
                limit=MOST_HEADER_BYTES,
            )
    return found


def header(headers: Headers, name: bytes) -> str | None:
    """The value of one header."""
    value = headers.get(name)
    return None if value is None else str(value, "latin-1")


def wait(headers: Headers) -> float | None:
    """Seconds that the caller is prepared to wait, by the preference of RFC 7240, section 4.3; decimals are read too.

    None where there is no such preference. One that can't be read is ignored, as preferences are.
    """
    preferences = headers.get(b"prefer")
    found = None if preferences is None else _WAIT.search(preferences)
    return None if found is None else float(found[1])


def accepted(headers: Headers, operation: Operation[Any]) -> str:
    """The media type of the reply. Raises NotAcceptable where there is none to agree on.

    Without a preference, a reply that carries tensors comes in the form of the request.
    """
    sent = content_type(headers) if operation.tensors else JSON
    best = _best(header(headers, b"accept") or "*/*", operation.tensors, operation.pictures, sent == SAFETENSORS)
    check_drawable(best)
    return best


@lru_cache(maxsize=256)
def _best(wanted: str, tensors: bool, pictures: bool, as_tensors: bool) -> str:
    offered = [JSON, SAFETENSORS] if tensors else [JSON]
    offered += PICTURES if pictures else ()
    if as_tensors:
        offered.reverse()
    try:
        # mimeparse takes the last of equals.
        best = mimeparse.best_match(offered[::-1], wanted)
    except (mimeparse.MimeTypeParseException, ValueError):
        best = ""
    if not best:
        raise NotAcceptable(
            f"Accept: {wanted[:80]!r} leaves no form for this reply; expected {' or '.join(offered)}", offered=offered
        )
    return str(best)


def content_type(headers: Headers) -> str:
    """The body's media type, without its parameters; JSON where none is stated."""
    return _media_type(headers.get(b"content-type", b""))


@lru_cache(maxsize=256)
def _media_type(value: bytes) -> str:
    return str(value, "latin-1").partition(";")[0].strip().lower() or JSON


async def read(
    scope: Scope, headers: Headers, receive: Receive, operation: Operation[Any], forms: Forms, limit: int, memory: Body
) -> Any:
    """The request that the body (of a GET: the query string) holds.

    Raises UnsupportedMediaType, BodyTooLarge, Unreadable, an InvalidRequest that names the field at fault, or what
    ``memory`` does.
    """
    model = operation.request
    if model is None:
        return None
    if operation.method == "GET":
        return validate(model, _query(scope), by_name=False)
    media_type = content_type(headers)
    offered = [JSON, SAFETENSORS] if operation.tensors else [JSON]
    if media_type not in offered:
        raise UnsupportedMediaType(
            f"Content-Type: {media_type[:80]!r} is not read here; expected {' or '.join(offered)}", offered=offered
        )
    body = await read_body(headers, receive, limit, memory)
    if media_type == SAFETENSORS:
        if int.from_bytes(body[:8], "little") <= _FEW_BYTES:
            return forms.read(model, body)
    elif is_quickly_read(body):
        return from_body(model, body, media_type, "request")
    return await run_in_threadpool(from_body, model, body, media_type, "request")


def is_quickly_read(text: memoryview) -> bool:
    """Whether JSON text holds little beside numbers, and not too many of them."""
    if len(text) <= _FEW_BYTES:
        return True
    if len(text) > _INLINE_BYTES:
        return False
    characters = np.frombuffer(text, np.uint8)
    return sum(int(np.count_nonzero(characters == ord(each))) for each in '["') <= _FEW_ROWS


def _query(scope: Scope) -> dict[str, str]:
    text = scope["query_string"]
    if len(text) > MOST_HEADER_BYTES:
        raise InvalidRequest(
            f"the query has {len(text)} bytes; expected at most {MOST_HEADER_BYTES}", limit=MOST_HEADER_BYTES
        )
    values = QueryParams(text).multi_items()
    for name, count in Counter(name for name, _ in values).items():
        if count > 1:
            raise InvalidRequest(f"{clip(name)}: it came more than once; send it once", param=clip(name))
    return dict(values)


async def render(
    model: BaseModel, media_type: str, *, encoding: Encoding = "list", status: int = 200, headers: Mapping[str, str]
) -> "Reply":
    """The response that carries a reply."""
    if media_type == SAFETENSORS:  # the tensors' own memory: nothing to convert
        pieces = to_body(model, media_type, "reply")
    elif is_quickly_written(_tensor_bytes(model)):
        pieces = to_body(model, media_type, "reply", encoding)
    else:
        pieces = await run_in_threadpool(to_body, model, media_type, "reply", encoding)
    return Reply(pieces, media_type, status, headers)


def is_quickly_written(tensor_bytes: int) -> bool:
    """Whether tensors of so many bytes are written as lists where they are, and not on a thread."""
    return tensor_bytes <= _INLINE_BYTES // 4


def _tensor_bytes(value: Any) -> int:
    """Bytes of the tensors of a reply."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, BaseModel):
        value = vars(value)
    return sum(map(_tensor_bytes, value.values())) if isinstance(value, dict) else 0


class Reply:
    """A response whose body is sent as it lies in memory, a small one in one piece."""

    def __init__(
        self, pieces: Sequence[bytes | memoryview], media_type: str, status: int, headers: Mapping[str, str]
    ) -> None:
        length = sum(map(len, pieces))
        self._pieces = [b"".join(pieces)] if length <= _JOINED_BYTES else pieces
        self._status = status
        self._headers = [(b"content-type", media_type.encode()), (b"content-length", b"%d" % length)]
        self._headers += [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head, then every piece."""
        await send({"type": "http.response.start", "status": self._status, "headers": self._headers})
        *first, last = self._pieces
        for piece in first:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": last})


_JOINED_BYTES = 2**16
"""Up to this size a copy costs less than another message."""

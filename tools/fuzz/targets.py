"""The readers under test: each takes any bytes, and accepts them or refuses them with one of the library's own errors.

A target returns True if it accepted its input. What it accepts is written and read again, with the same bytes. Anything
that a target raises is a fault. libFuzzer bounds the time and the memory of each input.
"""

import asyncio
import atexit
import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any, Final

import orjson
from backports import zstd
from pydantic import BaseModel
from tests.bodies import body_of

from attention_contract import wire
from attention_contract.base import WireModel
from attention_contract.errors import AttentionError
from attention_contract.frames import reply_from_frame, request_from_frame, to_frame
from attention_contract.json_reading import check_text, measure_text
from attention_contract.json_writing import to_json
from attention_contract.operations import OPERATIONS
from attention_contract.spec import AttentionSpec
from attention_contract.tensors import TensorFault, decode, encode
from attention_contract.validation import validate
from attention_service.api import request_head
from attention_service.api.bodies import negotiation
from attention_service.api.bodies.request_body import read_body
from attention_service.runtime.scheduling.budget import Budget

Target = Callable[[bytes], bool]
MODELS: Final = sorted({each.request for each in OPERATIONS if each.request}, key=lambda model: model.__name__)
"""The requests of all operations. The first byte of an input chooses one."""
MODULE_OPERATIONS: Final = [each for each in OPERATIONS if each.tensors]
LONGEST_DETAIL: Final = 1000
"""Characters of a message, whatever came."""
UNPACKED_LIMIT: Final = 2**16
"""The largest body in bytes that the target of content codings takes."""


class PropertyError(AssertionError):
    """An accepted input that did not survive being written and read, or a refusal that is not fit for a caller."""


def refused(error: AttentionError) -> bool:
    """Check a refusal: it blames the caller, is short, and is a problem document. Returns False."""
    if not 400 <= error.status < 500:
        raise PropertyError(f"{type(error).__name__} has status {error.status}")
    if len(error.detail) > LONGEST_DETAIL:
        raise PropertyError(f"a message of {len(error.detail)} characters")
    json.dumps(error.to_problem())
    return False


def _survives(model: BaseModel, media_type: str, entry: Any) -> None:
    written = b"".join(wire.to_body(model, media_type, entry, "base64"))
    again = wire.from_body(type(model), written, media_type, entry)
    if b"".join(wire.to_body(again, media_type, entry, "base64")) != written:
        raise PropertyError(f"{type(model).__name__} is another after it was written and read as {media_type}")


def _body(data: bytes, media_type: str) -> bool:
    if not data:
        return False
    model, body = MODELS[data[0] % len(MODELS)], data[1:]
    try:
        size = None
        if media_type == wire.JSON:
            size = measure_text(body)
            check_text(size)
        request = wire.from_body(model, body, media_type, "request", size)
    except AttentionError as error:
        return refused(error)
    for form in wire.MEDIA_TYPES:
        _survives(request, form, "request")
    return True


def json_body(data: bytes) -> bool:
    """Read the JSON body of any operation."""
    return _body(data, wire.JSON)


def safetensors_body(data: bytes) -> bool:
    """Read the safetensors body of any operation, as it came."""
    return _body(data, wire.SAFETENSORS)


def safetensors_header(data: bytes) -> bool:
    """Read a body whose header is the input up to its last brace, and whose length says so."""
    text = data[1 : data.rfind(b"}") + 1]
    tensors = data[len(text) + 1 :]
    return _body(data[:1] + len(text).to_bytes(8, "little") + text + tensors, wire.SAFETENSORS)


def spec(data: bytes) -> bool:
    """Read the spec of an attention."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return False
    try:
        made = validate(AttentionSpec, value, by_name=False)
    except AttentionError as error:
        return refused(error)
    _survives(made, wire.JSON, "request")
    return True


def tensor(data: bytes) -> bool:
    """Read one tensor in any of its JSON forms."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return False
    try:
        array = decode(value)
    except TensorFault as fault:
        if len(fault.message) > LONGEST_DETAIL:
            raise PropertyError(f"a message of {len(fault.message)} characters") from None
        return False
    again = decode(orjson.loads(to_json(encode(array, "base64"))))
    if (again.dtype, again.shape, again.tobytes()) != (array.dtype, array.shape, array.tobytes()):
        raise PropertyError("a tensor is another after it was written and read")
    return True


def frame(data: bytes) -> bool:
    """Read a message of a stream of steps. The first byte chooses text or binary, request or reply."""
    if not data:
        return False
    read: Callable[[Any], WireModel] = request_from_frame if data[0] & 1 else reply_from_frame
    text = bool(data[0] & 2)
    try:
        message = read(data[1:].decode() if text else data[1:])
    except UnicodeDecodeError:  # the server's WebSocket library refuses it
        return False
    except AttentionError as error:
        return refused(error)
    entry: Any = "request" if data[0] & 1 else "reply"
    for form in (True, False):
        written = to_frame(message, text=form, entry=entry, encoding="base64")
        if to_frame(read(written), text=form, entry=entry, encoding="base64") != written:
            raise PropertyError("a message is another after it was written and read")
    return True


_LOOP = asyncio.new_event_loop()
atexit.register(_LOOP.close)


def content_coding(data: bytes) -> bool:
    """Decompress a body. The first byte chooses the coding."""
    if not data:
        return False
    coding, pack = ((b"gzip", gzip.compress), (b"zstd", zstd.compress), (b"deflate", zlib.compress))[data[0] % 3]
    try:
        body = _LOOP.run_until_complete(_unpacked(data[1:], coding))
    except AttentionError as error:
        return refused(error)
    if len(body) > UNPACKED_LIMIT:
        raise PropertyError(f"a body of {len(body)} bytes passed a limit of {UNPACKED_LIMIT}")
    if _LOOP.run_until_complete(_unpacked(pack(body), coding)) != body:
        raise PropertyError("a body is another after it was compressed and read")
    return True


async def _unpacked(body: bytes, coding: bytes) -> bytes:
    come = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not come.is_set():
            come.set()
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()
        raise RuntimeError

    headers = {b"content-encoding": coding, b"content-length": b"%d" % len(body)}
    budget = Budget(2**24, 2**24, lambda: 0, 1)
    with body_of(budget) as memory:
        unpacked = bytes(await read_body(headers, receive, UNPACKED_LIMIT, memory))
    if budget.bodies:
        raise PropertyError(f"{budget.bodies} bytes are still counted")
    return unpacked


def negotiated_headers(data: bytes) -> bool:
    """Read the headers that choose the forms and the deadline of a reply."""
    values = data.split(b"\n")
    names = (b"accept", b"content-type", b"prefer", b"if-match")
    headers = request_head.headers_of({"headers": list(zip(names, values, strict=False))})
    try:
        media_type = negotiation.accepted(headers, MODULE_OPERATIONS[len(data) % len(MODULE_OPERATIONS)])
    except AttentionError as error:
        return refused(error)
    wait = request_head.wait_seconds(headers)
    if media_type not in {*wire.MEDIA_TYPES, *wire.PICTURES} or not (wait is None or 0 <= wait < 10**9):
        raise PropertyError(f"{media_type!r} within {wait} s")
    return True


TARGETS: Final[dict[str, Target]] = {
    each.__name__: each
    for each in (
        json_body, safetensors_body, safetensors_header, spec, tensor, frame, content_coding, negotiated_headers,
    )
}  # fmt: skip
"""The targets, by name."""

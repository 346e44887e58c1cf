"""Bodies of the protocol: the native request of an inference, and the small ones beside it."""

import time
from functools import partial
from typing import Final, TypeVar

import numpy as np
from starlette.types import Receive, Scope

from attention_contract.base import WireModel
from attention_contract.errors import BodyTooLarge, InvalidRequest
from attention_contract.json_reading import TextSize, check_objects, from_json
from attention_contract.tensors import DTYPES, Array
from attention_contract.validation import validate
from attention_contract.wire import JSON
from attention_service.api.doors.oip.inference_envelope import InferenceRequest, tensors_of
from attention_service.api.doors.oip.inference_reply import HEADER_LENGTH
from attention_service.api.doors.oip.model_questions import RAW, Model, pin_of, request_of
from attention_service.api.handlers import Headers, RequestContext, parsed, pinned, read_body
from attention_service.modules.resident import Module
from attention_service.runtime.request_timing import note
from attention_service.runtime.scheduling.budget import BodyMemory

ModelT = TypeVar("ModelT", bound=WireModel)
_TINY_HEAD: Final = 1024
"""Bytes of a JSON object that has too few values for any limit, as that of most requests with binary tensors."""
_HEADER: Final = HEADER_LENGTH.lower().encode()


async def read_inference(
    scope: Scope, receive: Receive, memory: BodyMemory, call: RequestContext, model: Model, module: Module | None
) -> tuple[InferenceRequest, WireModel]:
    """The envelope in a body, and the native request that it stands for, pinned as the call and the envelope say."""
    settings, length = call.settings, _header_length(call.headers)
    most_text = min(settings.max_body_bytes, settings.max_json_bytes)
    body = await _received(scope, receive, memory, call, most_text if length is None else settings.max_body_bytes)
    if length is not None and length > len(body):
        raise InvalidRequest.at(HEADER_LENGTH, f"it says {length} bytes; the body has {len(body)}, decompressed")
    if length == 0:
        envelope = InferenceRequest(inputs=[], parameters={"binary_data_output": True})
        request = request_of(model, {}, (), {"query": _raw_input(module, body)})
        return envelope, request if call.pin is None else pinned(request, call.pin)
    head, behind = (body, body[:0]) if length is None else (body[:length], body[length:])
    if len(head) > most_text:
        raise BodyTooLarge(
            f"the JSON object has {len(head)} bytes; at most {most_text} are read. Send tensors as bytes behind it",
            limit_bytes=most_text,
            needed_bytes=len(head),
        )

    def read(text: memoryview, size: TextSize | None) -> tuple[InferenceRequest, WireModel]:
        envelope = _model(InferenceRequest, text, size)
        envelope.check()
        request = request_of(model, envelope.options, envelope.wanted, tensors_of(envelope, behind))
        for pin in (pin_of(envelope.model_version, model), call.pin):
            request = request if pin is None else pinned(request, pin)
        return envelope, request

    if len(head) <= _TINY_HEAD:
        began = time.monotonic()
        inference = read(head, None)
        note("decode", began)
        return inference
    return await parsed(head, read, JSON, settings, memory)


async def read_small(
    kind: type[ModelT], scope: Scope, receive: Receive, memory: BodyMemory, call: RequestContext
) -> ModelT:
    """A body that may be empty, as a model."""
    settings = call.settings
    body = await _received(scope, receive, memory, call, min(settings.max_body_bytes, settings.max_json_bytes))
    return await parsed(body, partial(_model, kind), JSON, settings, memory) if body else kind()


async def _received(scope: Scope, receive: Receive, memory: BodyMemory, call: RequestContext, limit: int) -> memoryview:
    ratio = call.settings.max_compression_ratio
    return await read_body(call.headers, receive, limit, memory, ratio, scope.get("state", {}))


def _model(kind: type[ModelT], text: memoryview, size: TextSize | None) -> ModelT:
    """A JSON text of this measured size as a model."""
    if size is not None:
        check_objects(size.items)
    return validate(kind, from_json(text), by_name=False)


def _header_length(headers: Headers) -> int | None:
    """The bytes of the JSON object, uncompressed, if others follow it. Raises InvalidRequest for no number."""
    text = headers.get(_HEADER)
    if text is None:
        return None
    if not text.isdigit() or len(text) > 18:
        raise InvalidRequest.at(HEADER_LENGTH, "expected the number of bytes of the JSON object, or 0 for none")
    return int(text)


def _raw_input(module: Module | None, body: memoryview) -> Array:
    """The query in a body that is nothing else: tokens of a module, in its dtype."""
    if module is None:
        raise InvalidRequest.at(HEADER_LENGTH, f"{RAW} has inputs of any width; describe them in a JSON object")
    dtype, width = DTYPES[module.config.dtype or "float32"], module.sizes.d_model
    if not body or len(body) % (width * dtype.itemsize):
        raise InvalidRequest.at(
            "query",
            f"the body has {len(body)} bytes; expected a multiple of {width * dtype.itemsize}, the bytes of a token",
        )
    array = np.frombuffer(body, dtype).reshape(-1, width)
    return array if array.flags.aligned else array.copy()

"""The reply to an inference: a native reply's tensors as outputs, and all else of it as parameters."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import orjson
from starlette.responses import Response

from attention_contract.errors import InvalidRequest
from attention_contract.json_writing import tensor_bytes
from attention_contract.schemas.attention import Ran
from attention_contract.tensor_files import NamedTensor, taken_apart
from attention_contract.tensors import DTYPES
from attention_contract.validation import clip
from attention_contract.wire import JSON
from attention_service.api.doors.oip.inference_envelope import DATATYPES, SIZE
from attention_service.api.doors.oip.model_questions import VERSION, Model
from attention_service.api.handlers import Reply, pieces_of, render
from attention_service.runtime.request_timing import note
from attention_service.runtime.scheduling.budget import UNCOUNTED, BodyMemory

HEADER_LENGTH: Final = "Inference-Header-Content-Length"
"""The header with the bytes of the JSON object, where other bytes follow it."""
BINARY_TYPE: Final = "application/octet-stream"
_TEXT_BYTES: Final = 10
"""Bytes of memory for each byte of a tensor while it is written as numbers, at most."""


def parameters_of(rest: Mapping[str, Any], ran: Ran) -> dict[str, Any]:
    """All of a reply but its tensors: the module's version, and the other fields as JSON text."""
    parameters = {name: orjson.dumps(value).decode() for name, value in rest.items() if value != {}}
    return parameters if ran.version is None else {"version": ran.version} | parameters


def selected(tensors: Sequence[NamedTensor], wanted: Mapping[str, bool | None]) -> list[NamedTensor]:
    """The requested tensors, in the order of the request; all of them if none is named.

    Raises InvalidRequest for one that the reply does not have.
    """
    if not wanted:
        return [*tensors]
    by_name = {tensor.name: tensor for tensor in tensors}
    for index, name in enumerate(wanted):
        if name not in by_name:
            raise InvalidRequest.at(
                f"outputs.{index}.name",
                f"the reply has no {clip(name)!r}, which needs an input or a parameter that was not sent; it has "
                f"{clip(', '.join(by_name), 300)}",
            )
    return [by_name[name] for name in wanted]


def is_binary(tensor: NamedTensor, wish: bool | None, index: int) -> bool:
    """True if a tensor is to follow the JSON object: as requested, or because JSON lacks its numbers.

    Raises InvalidRequest if the request demands JSON that there is not.
    """
    if wish is True:
        return True
    lacks = tensor.dtype == "bfloat16" or (tensor.array.dtype.kind == "f" and not np.isfinite(tensor.array).all())
    if wish is False and lacks:
        fault = "is BF16" if tensor.dtype == "bfloat16" else "has NaN or infinite numbers"
        place = f"outputs.{index}.parameters.binary_data"
        raise InvalidRequest.at(place, f"the output {tensor.name!r} {fault}, which JSON lacks; ask for true")
    return bool(lacks)


async def write(
    model: Model,
    reply: Any,
    request_id: str | None,
    wanted: Mapping[str, bool | None],
    by_default: bool | None,
    memory: BodyMemory,
) -> Response:
    """The response with the outputs of a native reply. ``memory`` is held for what it writes as numbers."""
    began = time.monotonic()
    rest, tensors = taken_apart(reply)
    outputs: list[dict[str, Any]] = []
    behind: list[memoryview] = []
    for index, tensor in enumerate(selected(tensors, wanted)):
        array = np.ascontiguousarray(tensor.array, dtype=DTYPES[tensor.dtype]).reshape(-1)
        facts = {"name": tensor.name, "datatype": DATATYPES[tensor.dtype], "shape": list(tensor.array.shape)}
        if is_binary(tensor, wanted.get(tensor.name, by_default), index):
            behind.append(array.view(np.uint8).data)
            outputs.append(facts | {"parameters": {SIZE: array.nbytes}})
        else:
            outputs.append(facts | {"data": array})
    envelope: dict[str, Any] = {"model_name": model.name, "model_version": VERSION}
    if request_id is not None:
        envelope["id"] = request_id
    envelope |= {"parameters": parameters_of(rest, reply.ran), "outputs": outputs}
    if not behind:
        answer = await render(envelope, JSON, headers={})
    else:
        size = 0 if len(behind) == len(outputs) else tensor_bytes(outputs)
        if size > UNCOUNTED:
            memory.become_reply(_TEXT_BYTES * size)
        head = await pieces_of(envelope, JSON, "list", size) if size else [orjson.dumps(envelope)]
        note("encode", began)
        answer = Reply([*head, *behind], BINARY_TYPE, 200, {HEADER_LENGTH: str(sum(map(len, head)))})
    if (held := getattr(answer, "held_bytes", 0)) > UNCOUNTED:
        memory.become_reply(held)
    return answer

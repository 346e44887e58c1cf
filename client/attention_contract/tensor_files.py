"""Models as safetensors files: tensors under their dotted field name, all else as JSON text in one metadata entry.

A file is the length of its header in 8 bytes, the header as JSON, and the bytes of the tensors without gaps.
"""

import math
from functools import cache
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel

from attention_contract.errors import InvalidTensor, Unreadable
from attention_contract.json_reading import check_text, from_json, measure_text
from attention_contract.json_writing import fields_on_wire, plain_scalar
from attention_contract.request_options import MAX_TENSORS as MAX_REMEMBERED
from attention_contract.request_options import MAX_TEXT, parsed_options, with_tensors
from attention_contract.tensor_places import place_tensor
from attention_contract.tensors import (
    DTYPES,
    FLOATS,
    TensorFault,
    Untyped,
    checked_shape,
    dtype_name,
    from_buffer,
    nested,
)
from attention_contract.validation import clip, validate

Entry = Literal["request", "reply"]
"""The metadata entry that holds all but the tensors."""
ModelT = TypeVar("ModelT", bound=BaseModel)

MAX_HEADER: Final = 16 * 2**20
"""Bytes of a header that is read."""
_SMALL_HEADER: Final = 2**16
MAX_TENSORS: Final = 4096
"""Tensors of one file."""
_CODES: Final = {
    "bool": "BOOL",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
_NAMES: Final = {code: name for name, code in _CODES.items()}
_PLAIN: Final = FLOATS | {"bool"}
"""Dtypes whose tensors every field takes as they are, or never."""


class NamedTensor(NamedTuple):
    """A tensor of a file."""

    name: str
    dtype: str
    array: NDArray[Any]


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def to_safetensors(model: BaseModel, entry: Entry) -> list[bytes | memoryview]:
    """The model as the pieces of a safetensors file. The tensors' own memory is among them, without a copy."""
    tensors: list[NamedTensor] = []
    rest = _take_tensors(model, "", tensors)
    header: dict[str, Any] = {"__metadata__": {entry: orjson.dumps(rest).decode()}}
    pieces: list[bytes | memoryview] = []
    offset = 0
    # Wide dtypes first, so that every tensor is aligned to its element size, as the format recommends.
    tensors.sort(key=lambda tensor: -tensor.array.dtype.itemsize)
    for name, dtype, array in tensors:
        data = np.ascontiguousarray(array, dtype=DTYPES[dtype]).reshape(-1).view(np.uint8).data
        end = offset + len(data)
        header[name] = {"dtype": _CODES[dtype], "shape": array.shape, "data_offsets": (offset, end)}
        offset = end
        pieces.append(data)
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *pieces]


def _take_tensors(value: Any, path: str, tensors: list[NamedTensor]) -> Any:
    """The value without its tensors, which are added to ``tensors``."""
    if isinstance(value, BaseModel):
        value = fields_on_wire(value)
    if isinstance(value, dict):
        rest = {}
        for key, item in value.items():
            kind = type(item)
            # Most values of a reply are plain. A call for each would take longer than all else here.
            if kind is str or (kind is float and math.isfinite(item)) or (kind is int and item.bit_length() < 64):
                rest[key] = item
            elif not isinstance(item, np.ndarray):
                rest[key] = _take_tensors(item, f"{path}{key}.", tensors)
            elif isinstance(item, Untyped):
                rest[key] = nested(item)
            else:
                tensors.append(NamedTensor(f"{path}{key}", dtype_name(item), item))
        return rest
    if isinstance(value, (list, tuple)):
        return [_take_tensors(item, f"{path}{index}.", tensors) for index, item in enumerate(value)]
    return plain_scalar(value)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def from_safetensors(body: bytes | memoryview, entry: Entry, model: type[ModelT]) -> ModelT:
    """Read a model from a safetensors file. Its tensors are views into the body.

    Raises Unreadable for a broken file or metadata, InvalidTensor or InvalidRequest for a field at fault.
    """
    view = memoryview(body)
    header, start = _read_header(view)
    metadata = header.pop("__metadata__", {})
    text = metadata.get(entry, "{}") if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise Unreadable(f"the safetensors metadata is not an object whose entry {entry!r} is text")
    tensors = _read_tensors(view[start:], header)
    if entry == "request" and len(text) <= MAX_TEXT and len(tensors) <= MAX_REMEMBERED:
        fields = _fields(model)
        if all(name in fields and dtype in _PLAIN for name, dtype, _ in tensors):
            options: ModelT = parsed_options(model, text, tuple([(name, dtype) for name, dtype, _ in tensors]))
            return with_tensors(options, {name: array for name, _, array in tensors})
    encoded = text.encode()
    if len(encoded) > _SMALL_HEADER:
        check_text(measure_text(encoded))
    data = from_json(encoded, f"the metadata entry {entry!r}")
    for name, _, array in tensors:
        place_tensor(data, name, array, model)
    return validate(model, data, by_name=False)


@cache
def _fields(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(model.model_fields)


def _read_header(view: memoryview) -> tuple[dict[str, Any], int]:
    """The header of a file, and the byte at which its tensors begin."""
    if len(view) < 8:
        raise Unreadable(f"the safetensors file has {len(view)} bytes; expected at least 8")
    size = int.from_bytes(view[:8], "little")
    if size > min(MAX_HEADER, len(view) - 8):
        raise Unreadable(f"the safetensors header says {size} bytes; the body has {len(view) - 8} after its length")
    text = bytes(view[8 : 8 + size])
    if (count := text.count(b'"data_offsets"')) > MAX_TENSORS:
        raise Unreadable(f"the safetensors file has {count} tensors; expected at most {MAX_TENSORS}")
    if size > _SMALL_HEADER:
        check_text(measure_text(text))
    return from_json(text, "the safetensors header"), 8 + size


def _read_tensors(data: memoryview, header: dict[str, Any]) -> list[NamedTensor]:
    """The tensors of a file, once it is known that they fill it without gaps or overlaps."""
    placed = [(*_offsets(name, entry), name) for name, entry in header.items()]
    placed.sort(key=itemgetter(0, 1))
    tensors = []
    end = 0
    for first, last, name in placed:
        if first != end or last < first:
            raise Unreadable(f"tensor {name[:80]!r} starts at byte {first}; expected {end}: tensors must fill the file")
        end = last
        if last > len(data):
            raise Unreadable(f"tensor {name[:80]!r} ends at byte {last}; the file holds {len(data)}")
        entry = header[name]
        code = entry.get("dtype")
        dtype = _NAMES.get(code) if isinstance(code, str) else None
        if dtype is None:
            param, known = clip(name), ", ".join(_NAMES)
            raise InvalidTensor(f"{param}: unknown dtype {str(code)[:20]!r}; expected one of {known}", param=param)
        try:
            array = from_buffer(data[first:last], DTYPES[dtype], checked_shape(entry.get("shape")))
        except TensorFault as fault:
            raise InvalidTensor(f"{clip(name)}: {fault.message}", param=clip(name)) from None
        tensors.append(NamedTensor(name, dtype, array))
    if end != len(data):
        raise Unreadable(f"the file holds {len(data)} bytes of tensors; its header accounts for {end}")
    return tensors


def _offsets(name: str, entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if isinstance(offsets, list) and len(offsets) == 2:
        first, last = offsets
        if type(first) is int and type(last) is int and first >= 0 <= last:
            return first, last
    raise Unreadable(f"tensor {name[:80]!r} has no valid data_offsets")

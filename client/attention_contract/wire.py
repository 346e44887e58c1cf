"""Models to bytes and back, in the two media types.

``application/json`` carries tensors in one of the forms of ``tensors``. ``application/vnd.safetensors`` carries them as
they lie in memory: a safetensors file whose tensors are named by their field (dotted when nested: ``mask``,
``edits.0.value``, ``parameters.q_proj.weight``), with the rest of the model as JSON text in one metadata entry,
``request`` or ``reply``.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeVar, get_args, get_origin

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from attention_contract.base import WireModel
from attention_contract.errors import InvalidRequest, InvalidTensor, Unreadable
from attention_contract.tensors import DTYPES, Encoding, TensorFault, checked_shape, dtype_name, encode, from_buffer

JSON: Final = "application/json"
SAFETENSORS: Final = "application/vnd.safetensors"
MEDIA_TYPES: Final = (JSON, SAFETENSORS)
Entry = Literal["request", "reply"]

_MAX_HEADER: Final = 16 * 2**20
_CODES: Final = {
    "bool": "BOOL",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
_FROM_CODES: Final = {code: DTYPES[name] for name, code in _CODES.items()}
ModelT = TypeVar("ModelT", bound=BaseModel)


# ── validation ───────────────────────────────────────────────────────────────────────────────────────────────────────


def validate(model: type[ModelT], data: Any) -> ModelT:
    """The model that the data stands for. Raises InvalidRequest or InvalidTensor, naming the first field at fault."""
    try:
        return model.model_validate(data)
    except ValidationError as fault:
        raise _as_contract_error(fault, data) from None


def _path(location: tuple[int | str, ...], data: Any) -> str:
    """The dotted path of a field. Pydantic puts the name of a union's chosen member into it, which is no field."""
    path = []
    for part in location:
        if isinstance(data, Mapping) and part not in data and data.get("name") == part:
            continue
        path.append(str(part))
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
    return ".".join(path)


def _as_contract_error(fault: ValidationError, data: Any) -> InvalidRequest:
    errors = fault.errors(include_url=False, include_input=False)
    first = errors[0]
    param = _path(first["loc"], data) or None
    others = [_path(error["loc"], data) for error in errors[1:9]]
    facts: dict[str, Any] = {"also": others} if others else {}
    message = first["msg"].removeprefix("Value error, ")
    detail = f"{param}: {message}" if param else message
    if first["type"] == "extra_forbidden":
        detail = f"{param}: there is no such field; remove it or check its spelling"
    if first["type"] == "invalid_tensor":
        return InvalidTensor(detail, param=param, **facts)
    return InvalidRequest(detail, param=param, **facts)


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def to_json(model: BaseModel, encoding: Encoding = "list") -> bytes:
    """The model as JSON text. Fields that are unset or null are left out."""
    return orjson.dumps(_plain(_dump(model), encoding), option=orjson.OPT_SERIALIZE_NUMPY)


def _dump(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="python", by_alias=True, exclude_none=True)


def _plain(value: Any, encoding: Encoding) -> Any:
    if isinstance(value, np.ndarray):
        return encode(value, encoding)
    if isinstance(value, Mapping):
        return {key: _plain(item, encoding) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, encoding) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def from_json(body: bytes | memoryview) -> dict[str, Any]:
    """The object that a JSON text holds. Raises Unreadable for any other text."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as fault:
        raise Unreadable(
            f'the body is not JSON: {fault.msg} at byte {fault.pos}; write NaN as the string "NaN"'
        ) from None
    if not isinstance(value, dict):
        raise Unreadable(f"expected a JSON object, got {type(value).__name__}")
    return value


# ── safetensors ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Placed(NamedTuple):
    name: str
    array: NDArray[Any]


def to_safetensors(model: BaseModel, entry: Entry) -> list[bytes | memoryview]:
    """The model as a safetensors file: its pieces in order, the tensors' own memory among them, not copied."""
    placed: list[_Placed] = []
    rest = _take_tensors(_dump(model), "", placed)
    header: dict[str, Any] = {"__metadata__": {entry: json.dumps(rest, separators=(",", ":"))}}
    pieces: list[bytes | memoryview] = []
    offset = 0
    # Wide dtypes first, so that every tensor is aligned to its element size, as the format recommends.
    for name, array in sorted(placed, key=lambda item: -item.array.dtype.itemsize):
        dtype = dtype_name(array)
        data = np.ascontiguousarray(array, dtype=DTYPES[dtype]).reshape(-1).view(np.uint8)
        header[name] = {
            "dtype": _CODES[dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + data.nbytes],
        }
        offset += data.nbytes
        pieces.append(data.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *pieces]


def _take_tensors(value: Any, path: str, placed: list[_Placed]) -> Any:
    """The value without its tensors, which are added to ``placed`` under their dotted path."""
    if isinstance(value, Mapping):
        rest = {}
        for key, item in value.items():
            if isinstance(item, np.ndarray):
                placed.append(_Placed(f"{path}{key}", item))
            else:
                rest[key] = _take_tensors(item, f"{path}{key}.", placed)
        return rest
    if isinstance(value, list | tuple):
        return [_take_tensors(item, f"{path}{index}.", placed) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return _plain(value, "list")
    return value


def from_safetensors(body: bytes | memoryview, entry: Entry, model: type[BaseModel]) -> dict[str, Any]:
    """The data of a model from a safetensors file, ready for ``validate``; its tensors are views into the body.

    Raises Unreadable where the file or its metadata is broken, InvalidTensor where one tensor is.
    """
    view = memoryview(body)
    header, start = _header(view)
    metadata = header.pop("__metadata__", {})
    text = metadata.get(entry, "{}") if isinstance(metadata, dict) else "{}"
    if not isinstance(text, str):
        raise Unreadable(f"the metadata entry {entry!r} is not text")
    data = from_json(text.encode())
    for name, array in _tensors(view[start:], header):
        _place(data, name, array, model)
    return data


def _header(view: memoryview) -> tuple[dict[str, Any], int]:
    if len(view) < 8:
        raise Unreadable(f"the safetensors file has {len(view)} bytes; expected at least 8")
    size = int.from_bytes(view[:8], "little")
    if size > min(_MAX_HEADER, len(view) - 8):
        raise Unreadable(f"the safetensors header says {size} bytes; the body has {len(view) - 8} after its length")
    header = from_json(view[8 : 8 + size])
    return header, 8 + size


def _tensors(data: memoryview, header: dict[str, Any]) -> Iterator[_Placed]:
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: _offsets(item[0], item[1])):
        first, last = _offsets(name, entry)
        if first != end or last < first:
            raise Unreadable(f"tensor {name[:80]!r} starts at byte {first}; expected {end}: tensors must fill the file")
        end = last
        if last > len(data):
            raise Unreadable(f"tensor {name[:80]!r} ends at byte {last}; the file holds {len(data)}")
        dtype = _FROM_CODES.get(entry.get("dtype"))
        if dtype is None:
            known = ", ".join(_FROM_CODES)
            raise InvalidTensor(
                f"{name}: unknown dtype {str(entry.get('dtype'))[:20]!r}; expected one of {known}", param=name
            )
        try:
            array = from_buffer(data[first:last], dtype, checked_shape(entry.get("shape")))
        except TensorFault as fault:
            raise InvalidTensor(f"{name}: {fault.message}", param=name) from None
        yield _Placed(name, array)
    if end != len(data):
        raise Unreadable(f"the file holds {len(data)} bytes of tensors; its header accounts for {end}")


def _offsets(name: str, entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(at) is int and at >= 0 for at in offsets)):
        raise Unreadable(f"tensor {name[:80]!r} has no valid data_offsets")
    return offsets[0], offsets[1]


def _place(data: dict[str, Any], name: str, array: NDArray[Any], model: type[BaseModel]) -> None:
    """Put a tensor where its dotted name says. Names inside a field that maps names to tensors may hold dots."""
    field, dot, rest = name.partition(".")
    if dot and field in _maps(model):
        data.setdefault(field, {})[rest] = array
        return
    node: Any = data
    *path, last = name.split(".")
    for part in path:
        node = _child(node, part, name)
    if isinstance(node, dict):
        node[last] = array
    else:
        raise InvalidTensor(f"{name[:80]}: the request has no place for a tensor of this name", param=name[:80])


def _child(node: Any, part: str, name: str) -> Any:
    if isinstance(node, dict):
        return node.setdefault(part, {})
    if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
        return node[int(part)]
    raise InvalidTensor(f"{name[:80]}: the request has no place for a tensor of this name", param=name[:80])


def _maps(model: type[BaseModel]) -> set[str]:
    """The fields of a model that map names to tensors."""
    found = set()
    for name, field in model.model_fields.items():
        options = (field.annotation, *get_args(field.annotation))
        if any(get_origin(option) is dict for option in options):
            found.add(field.alias or name)
    return found


def from_body(model: type[ModelT], body: bytes | memoryview, media_type: str, entry: Entry) -> ModelT:
    """The model that a body of one of the two media types holds."""
    if media_type == SAFETENSORS:
        return validate(model, from_safetensors(body, entry, model))
    return validate(model, from_json(body))


def to_body(model: BaseModel, media_type: str, entry: Entry, encoding: Encoding = "list") -> list[bytes | memoryview]:
    """The pieces of a model's body in one of the two media types."""
    return to_safetensors(model, entry) if media_type == SAFETENSORS else [to_json(model, encoding)]


__all__ = [
    "JSON",
    "MEDIA_TYPES",
    "SAFETENSORS",
    "WireModel",
    "from_body",
    "from_json",
    "from_safetensors",
    "to_body",
    "to_json",
    "to_safetensors",
    "validate",
]

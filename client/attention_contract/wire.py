"""Models to bytes and back, in the two media types.

``application/json`` carries tensors in one of the forms of ``tensors``. ``application/vnd.safetensors`` carries them as
they lie in memory: a safetensors file whose tensors are named by their field (dotted when nested: ``mask``,
``edits.0.value``, ``parameters.q_proj.weight``), with the rest of the model as JSON text in one metadata entry,
``request`` or ``reply``. Numbers without a dtype (``Untyped``) are nested lists in both, and so stay without one.
"""

import math
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest
from typing import Any, Final, Literal, NamedTuple, TypeVar, get_origin

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel

from attention_contract import lists
from attention_contract.errors import InvalidTensor, Unreadable
from attention_contract.reading import read_json
from attention_contract.tensors import (
    DTYPES,
    Encoding,
    TensorFault,
    Untyped,
    checked_shape,
    dtype_name,
    encode,
    from_buffer,
    nested,
)
from attention_contract.validation import clip, fields_of, members_of, validate

JSON: Final = "application/json"
SAFETENSORS: Final = "application/vnd.safetensors"
MEDIA_TYPES: Final = (JSON, SAFETENSORS)
PICTURES: Final = {"image/svg+xml": "svg", "image/png": "png"}
"""Media types of replies that can be drawn, and the ending of their files."""
Entry = Literal["request", "reply"]

MAX_HEADER: Final = 16 * 2**20
"""Bytes of a safetensors header that are read."""
MAX_TENSORS: Final = 4096
"""Tensors of a safetensors file."""
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
_AS_IT_IS: Final = {np.dtype(np.float32), np.dtype(np.float64)}
"""What orjson writes without being told how."""
_WRITTEN: Final = b"\x00"
"""No JSON text has this character."""
ModelT = TypeVar("ModelT", bound=BaseModel)


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def to_json(model: BaseModel, encoding: Encoding = "list") -> bytes:
    """The model as JSON text. Fields that are unset or null are left out."""
    return dump_json(model, encoding)


def dump_json(value: Any, encoding: Encoding = "list") -> bytes:
    """A value of mappings, lists, numbers and arrays as JSON text, its non-finite numbers as strings."""
    return b"".join(_json_pieces(value, encoding))


def _json_pieces(value: Any, encoding: Encoding) -> list[bytes | memoryview]:
    """The pieces of that text: what ``lists`` writes is not copied."""
    written: list[memoryview] = []
    text = orjson.dumps(_plain(value, encoding, written), option=orjson.OPT_SERIALIZE_NUMPY)
    if not written:
        return [text]
    pieces: list[bytes | memoryview] = []
    for before, numbers in zip_longest(text.split(_WRITTEN), written, fillvalue=b""):
        pieces += before, numbers
    return pieces


def dump_array(array: NDArray[Any]) -> bytes | memoryview:
    """An array as nested lists in JSON text, its non-finite numbers as strings."""
    text = lists.write(array)
    if text is not None:
        return text
    if array.ndim and array.dtype in _AS_IT_IS:
        plain = orjson.dumps(np.ascontiguousarray(array), option=orjson.OPT_SERIALIZE_NUMPY)
        if b"n" not in plain:  # what is not finite, orjson writes as null
            return plain
    return dump_json(array)


def _dump(model: BaseModel) -> dict[str, Any]:
    """The fields of a model by their name on the wire, null ones left out; what is nested in them as it is."""
    names = _names(type(model))
    return {names[name]: value for name, value in model.__dict__.items() if value is not None}


@cache
def _names(model: type[BaseModel]) -> dict[str, str]:
    return {name: field.alias or name for name, field in model.model_fields.items()}


def _plain(value: Any, encoding: Encoding, written: list[memoryview]) -> Any:
    """What orjson writes, with ``_WRITTEN`` in the place of each text that is added to ``written``."""
    if isinstance(value, np.ndarray):
        if isinstance(value, Untyped):
            encoding = "list"
        text = lists.write(value) if encoding == "list" else None
        if text is None:
            return encode(value, encoding)
        written.append(text)
        return orjson.Fragment(_WRITTEN)
    if isinstance(value, BaseModel):
        value = _dump(value)
    if isinstance(value, dict):
        return {key: _plain(item, encoding, written) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, encoding, written) for item in value]
    return _plain_scalar(value)


def _plain_scalar(value: Any) -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(value)  # the fact of an error, such as the bytes that will never be had: orjson knows 64 bits
    return value


def from_json(body: bytes | memoryview, what: str = "the body") -> dict[str, Any]:
    """The object that a JSON text holds. Raises Unreadable for any other text, calling it ``what``."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as fault:
        raise Unreadable(
            f'{what} is not JSON: {clip(fault.msg)} at character {fault.pos}; write NaN as the string "NaN"'
        ) from None
    if not isinstance(value, dict):
        raise Unreadable(f"{what} is not a JSON object but {type(value).__name__}")
    return value


# ── safetensors ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Placed(NamedTuple):
    name: str
    array: NDArray[Any]


def to_safetensors(model: BaseModel, entry: Entry) -> list[bytes | memoryview]:
    """The model as a safetensors file: its pieces in order, the tensors' own memory among them, not copied."""
    placed: list[_Placed] = []
    rest = _take_tensors(model, "", placed)
    header: dict[str, Any] = {"__metadata__": {entry: orjson.dumps(rest).decode()}}
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
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *pieces]


def _take_tensors(value: Any, path: str, placed: list[_Placed]) -> Any:
    """The value without its tensors, which are added to ``placed`` under their dotted path."""
    if isinstance(value, BaseModel):
        value = _dump(value)
    if isinstance(value, dict):  # the check for any mapping would take longer than all else here
        rest = {}
        for key, item in value.items():
            kind = type(item)
            if kind is str or (kind is float and math.isfinite(item)):  # most of a reply: not worth a call each
                rest[key] = item
            elif not isinstance(item, np.ndarray):
                rest[key] = _take_tensors(item, f"{path}{key}.", placed)
            elif isinstance(item, Untyped):
                rest[key] = nested(item)
            else:
                placed.append(_Placed(f"{path}{key}", item))
        return rest
    if isinstance(value, (list, tuple)):
        return [_take_tensors(item, f"{path}{index}.", placed) for index, item in enumerate(value)]
    return _plain_scalar(value)


def from_safetensors(body: bytes | memoryview, entry: Entry, model: type[BaseModel]) -> dict[str, Any]:
    """The data of a model from a safetensors file, ready for ``validate``; its tensors are views into the body.

    Raises Unreadable where the file or its metadata is broken, InvalidTensor where one tensor is.
    """
    view = memoryview(body)
    header, start = read_header(view)
    metadata = header.pop("__metadata__", {})
    text = metadata.get(entry, "{}") if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise Unreadable(f"the safetensors metadata is not an object whose entry {entry!r} is text")
    data = from_json(text.encode(), f"the metadata entry {entry!r}")
    for name, array in _tensors(view[start:], header):
        _place(data, name, array, model)
    return data


def read_header(view: memoryview) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and at which byte its tensors begin. Raises Unreadable for a broken one."""
    if len(view) < 8:
        raise Unreadable(f"the safetensors file has {len(view)} bytes; expected at least 8")
    size = int.from_bytes(view[:8], "little")
    if size > min(MAX_HEADER, len(view) - 8):
        raise Unreadable(f"the safetensors header says {size} bytes; the body has {len(view) - 8} after its length")
    text = bytes(view[8 : 8 + size])
    if (count := text.count(b'"data_offsets"')) > MAX_TENSORS:
        raise Unreadable(f"the safetensors file has {count} tensors; expected at most {MAX_TENSORS}")
    header = from_json(text, "the safetensors header")
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
        param = clip(name)
        dtype = _FROM_CODES.get(str(entry.get("dtype")))
        if dtype is None:
            found, known = str(entry.get("dtype"))[:20], ", ".join(_FROM_CODES)
            raise InvalidTensor(f"{param}: unknown dtype {found!r}; expected one of {known}", param=param)
        try:
            array = from_buffer(data[first:last], dtype, checked_shape(entry.get("shape")))
        except TensorFault as fault:
            raise InvalidTensor(f"{param}: {fault.message}", param=param) from None
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
    node: Any = data
    *path, last = [field, rest] if dot and field in _maps(model) else name.split(".")
    for part in path:
        node = _child(node, part)
    param = clip(name)
    if not isinstance(node, dict):
        raise InvalidTensor(f"{param}: the request has no place for a tensor of this name", param=param)
    if last in node:
        raise InvalidTensor(f"{param}: it is given twice; send it as a tensor or in the metadata", param=param)
    node[last] = array


def _child(node: Any, part: str) -> Any:
    if isinstance(node, dict):
        return node.setdefault(part, {})
    if isinstance(node, list) and part.isdecimal() and len(part) < 10 and int(part) < len(node):
        return node[int(part)]
    return None


def _maps(model: type[BaseModel]) -> set[str]:
    """The fields of a model that map names to tensors."""
    return {name for name, kind in fields_of(model).items() if any(get_origin(m) is dict for m in members_of(kind))}


def from_body(model: type[ModelT], body: bytes | memoryview, media_type: str, entry: Entry) -> ModelT:
    """The model that a body of one of the two media types holds."""
    if media_type == SAFETENSORS:
        return validate(model, from_safetensors(body, entry, model), by_name=False)
    data = read_json(body, model)
    return validate(model, from_json(body) if data is None else data, by_name=False)


def to_body(model: BaseModel, media_type: str, entry: Entry, encoding: Encoding = "list") -> list[bytes | memoryview]:
    """The pieces of a model's body in one of the two media types."""
    return to_safetensors(model, entry) if media_type == SAFETENSORS else _json_pieces(model, encoding)


__all__ = [
    "JSON",
    "MAX_HEADER",
    "MEDIA_TYPES",
    "PICTURES",
    "SAFETENSORS",
    "dump_array",
    "dump_json",
    "from_body",
    "from_json",
    "from_safetensors",
    "read_header",
    "to_body",
    "to_json",
    "to_safetensors",
]

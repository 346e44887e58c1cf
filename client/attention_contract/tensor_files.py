"""Models as safetensors files: tensors under their dotted field name, all else as JSON text in one metadata entry.

A file is the length of its header in 8 bytes, the header as JSON, and the bytes of the tensors without gaps.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from operator import attrgetter, itemgetter
from typing import Any, Final, Literal, NamedTuple, TypeVar, get_args, get_origin

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel

from attention_contract.errors import InvalidTensor, Unreadable
from attention_contract.json_reading import check_text, from_json, is_tensor_map, measure_text
from attention_contract.json_writing import are_plain, fields_on_wire, plain_scalar
from attention_contract.tensors import DTYPES, TensorFault, Untyped, checked_shape, dtype_name, from_buffer, nested
from attention_contract.validation import clip, fields_of, members_of, validate

Entry = Literal["request", "reply", "recording", "lens"]
"""The metadata entry that holds all but the tensors."""
ModelT = TypeVar("ModelT", bound=BaseModel)

MAX_HEADER: Final = 16 * 2**20
"""Bytes of a header that is read."""
_SMALL_HEADER: Final = 2**16
_KNOWN_HEADER: Final = 2**10
"""Largest header in bytes that is remembered."""
MAX_TENSORS: Final = 4096
"""Tensors of one file."""
_CODES: Final = {
    "bool": "BOOL", "int32": "I32", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32",
    "float64": "F64",
}  # fmt: skip
DTYPE_NAMES: Final = {code: name for name, code in _CODES.items()}
"""The wire's name of each dtype of a safetensors file."""


class NamedTensor(NamedTuple):
    """A tensor of a file."""

    name: str
    dtype: str
    array: NDArray[Any]


class Shaped(NamedTuple):
    """A tensor without its numbers."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Header(NamedTuple):
    """The header of a file whose tensors fill it without gaps or overlaps."""

    metadata: dict[str, Any]
    tensors: tuple[Shaped, ...]
    """In the order of their bytes."""
    ends: tuple[int, ...]
    """The byte after each, counted from the end of the header."""


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def to_safetensors(model: BaseModel, entry: Entry) -> list[bytes | memoryview]:
    """The model as the pieces of a safetensors file. The tensors' own memory is among them, without a copy.

    A model with a ``file_entry`` is a file of its own kind and has this entry whatever ``entry`` says.
    """
    entry = _entry_of(type(model), entry)
    rest, tensors = taken_apart(model)
    header: dict[str, Any] = {"__metadata__": {entry: orjson.dumps(rest).decode()}}
    pieces: list[bytes | memoryview] = []
    offset = 0
    # Wide dtypes first, so that every tensor is aligned to its element size, as the format recommends.
    tensors.sort(key=attrgetter("array.itemsize"), reverse=True)
    for name, dtype, array in tensors:
        data = np.ascontiguousarray(array, dtype=DTYPES[dtype]).reshape(-1).view(np.uint8).data
        end = offset + len(data)
        header[name] = {"dtype": _CODES[dtype], "shape": array.shape, "data_offsets": (offset, end)}
        offset = end
        pieces.append(data)
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *pieces]


@cache  # pydantic's classes take long to say that they have no such attribute
def _entry_of(model: type[BaseModel], entry: Entry) -> Entry:
    return getattr(model, "file_entry", entry)


def taken_apart(model: BaseModel) -> tuple[dict[str, Any], list[NamedTensor]]:
    """The data of a model without its tensors, and the tensors, each under its dotted field name."""
    tensors: list[NamedTensor] = []
    return _take_tensors(model, "", tensors), tensors


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
        return (
            value
            if are_plain(value)
            else [_take_tensors(item, f"{path}{index}.", tensors) for index, item in enumerate(value)]
        )
    return plain_scalar(value)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def from_safetensors(body: bytes | memoryview, entry: Entry, model: type[ModelT]) -> ModelT:
    """Read a model from a safetensors file. Its tensors are views into the body.

    Raises Unreadable for a broken file or metadata, InvalidTensor or InvalidRequest for a field at fault.
    """
    entry = _entry_of(model, entry)
    return _model(*_read(memoryview(body), entry), entry, model)


def either_from_safetensors(
    body: bytes | memoryview, entry: Entry, choose: Callable[[dict[str, Any]], type[ModelT]]
) -> ModelT:
    """Read a model that its data without tensors tell. Raises what ``from_safetensors`` raises."""
    return _model(*_read(memoryview(body), entry), entry, choose)


def from_pieces(pieces: Sequence[bytes | memoryview], entry: Entry, model: type[ModelT]) -> ModelT:
    """Read a model from the pieces of its file, as ``to_safetensors`` returns them. Raises what that of a file does."""
    first, *rest = pieces
    header, text = _read_header(memoryview(first), entry)
    arrays = _arrays(header, rest)
    return _model(header, text, arrays, _entry_of(model, entry), model)


def _model(
    header: Header,
    text: str,
    arrays: Sequence[NDArray[Any]],
    entry: Entry,
    choose: type[ModelT] | Callable[[dict[str, Any]], type[ModelT]],
) -> ModelT:
    """The model of a file, or the one that ``choose`` returns for its data without tensors."""
    encoded = text.encode()
    if len(encoded) > _SMALL_HEADER:
        check_text(measure_text(encoded))
    data = from_json(encoded, f"the metadata entry {entry!r}")
    model = choose if isinstance(choose, type) else choose(data)
    for tensor, array in zip(header.tensors, arrays, strict=True):
        place_tensor(data, tensor.name, array, model)
    return validate(model, data, by_name=False)


def _read(view: memoryview, entry: Entry) -> tuple[Header, str, list[NDArray[Any]]]:
    """The header of a file, the text of its metadata entry, and its tensors."""
    header, entry_text = _read_header(view, entry)
    data = view[8 + int.from_bytes(view[:8], "little") :]
    start, parts = 0, []
    for tensor, end in zip(header.tensors, header.ends, strict=True):
        if end > len(data):
            raise Unreadable(f"tensor {tensor.name[:80]!r} ends at byte {end}; the file holds {len(data)}")
        parts.append(data[start:end])
        start = end
    if start != len(data):
        raise Unreadable(f"the file holds {len(data)} bytes of tensors; its header accounts for {start}")
    return header, entry_text, _arrays(header, parts)


def _read_header(view: memoryview, entry: Entry) -> tuple[Header, str]:
    """The header with which a file begins, and the text of its metadata entry."""
    if len(view) < 8:
        raise Unreadable(f"the safetensors file has {len(view)} bytes; expected at least 8")
    size = int.from_bytes(view[:8], "little")
    if size > min(MAX_HEADER, len(view) - 8):
        raise Unreadable(f"the safetensors header says {size} bytes; the body has {len(view) - 8} after its length")
    text = bytes(view[8 : 8 + size])
    header = _known_header(text) if size <= _KNOWN_HEADER else _header(text)
    entry_text = header.metadata.get(entry, "{}")
    if not isinstance(entry_text, str):
        raise _no_text(entry)
    return header, entry_text


def _arrays(header: Header, parts: Sequence[bytes | memoryview]) -> list[NDArray[Any]]:
    """The tensors of a file, each over its bytes."""
    arrays = []
    for tensor, part in zip(header.tensors, parts, strict=True):
        try:
            arrays.append(from_buffer(part, DTYPES[tensor.dtype], tensor.shape))
        except TensorFault as fault:
            raise InvalidTensor.at(clip(tensor.name), fault.message) from None
    return arrays


@lru_cache(maxsize=1024)  # callers send the same few again and again; reading one takes as long as validating a request
def _known_header(text: bytes) -> Header:
    return _header(text)


def _header(text: bytes) -> Header:
    """Read a header. Raises Unreadable or InvalidTensor."""
    if (count := text.count(b'"data_offsets"')) > MAX_TENSORS:
        raise Unreadable(f"the safetensors file has {count} tensors; expected at most {MAX_TENSORS}")
    if len(text) > _SMALL_HEADER:
        check_text(measure_text(text))
    entries = from_json(text, "the safetensors header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _no_text("request")
    placed = []
    for name, entry in entries.items():
        match entry:
            case {"data_offsets": [first, last]} if type(first) is type(last) is int and first >= 0 <= last:
                placed.append((first, last, name))
            case _:
                raise Unreadable(f"tensor {name[:80]!r} has no valid data_offsets")
    placed.sort(key=itemgetter(0, 1))
    tensors, end = [], 0
    for first, last, name in placed:
        if first != end or last < first:
            raise Unreadable(f"tensor {name[:80]!r} starts at byte {first}; expected {end}: tensors must fill the file")
        end = last
        tensors.append(_shaped(name, entries[name]))
    return Header(metadata, tuple(tensors), tuple([last for _, last, _ in placed]))


def _shaped(name: str, entry: dict[str, Any]) -> Shaped:
    code = entry.get("dtype")
    dtype = DTYPE_NAMES.get(code) if isinstance(code, str) else None
    if dtype is None:
        param, known = clip(name), ", ".join(DTYPE_NAMES)
        raise InvalidTensor.at(param, f"unknown dtype {str(code)[:20]!r}; expected one of {known}")
    try:
        return Shaped(name, dtype, checked_shape(entry.get("shape")))
    except TensorFault as fault:
        raise InvalidTensor.at(clip(name), fault.message) from None


def _no_text(entry: Entry) -> Unreadable:
    return Unreadable(f"the safetensors metadata is not an object whose entry {entry!r} is text")


def place_tensor(data: dict[str, Any], name: str, array: NDArray[Any], model: type[BaseModel]) -> None:
    """Put a tensor where its name says. Names within a field that maps names to tensors may hold dots.

    So may the keys of other maps, as in ``edits.decoder.0.1.value``: they are those that the data have. Raises
    InvalidTensor if there is no such place, or if it is taken.
    """
    node: Any = data
    kinds: tuple[Any, ...] = (model,)
    last = name
    while "." in last and not (below := _below(kinds)).names_tensors:
        key = last.partition(".")[0]
        if isinstance(node, dict) and key not in node:
            key = next((entry for entry in node if last.startswith(f"{entry}.")), key)
        kinds, last = (*below.items, *below.fields.get(key, ())), last[len(key) + 1 :]
        if isinstance(node, dict):
            node = node.setdefault(key, {})
        elif isinstance(node, list) and key.isdecimal() and len(key) < 10 and int(key) < len(node):
            node = node[int(key)]
        else:
            node = None
    if not isinstance(node, dict):
        param = clip(name)
        raise InvalidTensor.at(param, "the request has no tensor field of this name")
    if last in node:
        param = clip(name)
        raise InvalidTensor.at(param, "it is given twice; send it as a tensor or in the metadata")
    node[last] = array


class _Below(NamedTuple):
    """The types of what some types have below them."""

    names_tensors: bool
    """True if one of them is a map from names to tensors."""
    items: tuple[Any, ...]
    """The types of any item of a list or a map."""
    fields: dict[str, tuple[Any, ...]]
    """The types of the fields of models, by name."""


@cache
def _below(kinds: tuple[Any, ...]) -> _Below:
    items: list[Any] = []
    fields: dict[str, tuple[Any, ...]] = {}
    for kind in kinds:
        if get_origin(kind) in {list, dict}:
            items += members_of(get_args(kind)[-1])
        for name, field in fields_of(kind).items():
            fields[name] = (*fields.get(name, ()), *members_of(field))
    return _Below(any(map(is_tensor_map, kinds)), tuple(items), fields)

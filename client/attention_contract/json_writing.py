"""Data to JSON text. Tensors are nested lists or objects with base64; non-finite numbers are strings."""

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any, Final

import numpy as np
import orjson
from pydantic import BaseModel

from attention_contract.tensors import Encoding, Untyped, encode

AT_ONCE: Final = 2**20
"""Bytes of tensors in a reply whose text is made at once; that of more is made while it is sent."""
_SCALAR_TYPES: Final = frozenset({str, bool, type(None)})
_TENSORLESS: Final = frozenset({str, bool, int, float, tuple, type(None)})
"""Types of items that hold no tensors; a list may have hundreds of thousands."""
_SHORT_LISTS: Final = frozenset({list, tuple, type(None)})
_PIECE_ITEMS: Final = 2**16
"""Numbers whose text is made at once in a piece of such a text."""


def to_json(value: Any, encoding: Encoding = "list") -> bytes:
    """A model, or a value of mappings, lists, numbers and arrays, as JSON text. Unset and null fields are left out."""
    return orjson.dumps(_plain(value, encoding), option=orjson.OPT_SERIALIZE_NUMPY)


def json_pieces(value: Any, encoding: Encoding = "list") -> Iterator[bytes]:
    """Yield the text of ``to_json`` in pieces of about a megabyte, each made when it is asked for."""
    mark, arrays = secrets.token_hex(16), list[Any]()
    text = orjson.dumps(_plain(value, encoding, partial(_set_aside, mark, arrays)), option=orjson.OPT_SERIALIZE_NUMPY)
    first, *others = text.split(f'"{mark}"'.encode())
    yield first
    for array, after in zip(arrays, others, strict=True):
        yield from _array_pieces(array, "list" if isinstance(array, Untyped) else encoding)
        yield after


def tensor_bytes(value: Any) -> int:
    """Bytes of the tensors of a value."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, BaseModel):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list) or _TENSORLESS.issuperset(map(type, value)):
        return 0
    return sum(map(tensor_bytes, value))


def _set_aside(mark: str, arrays: list[Any], array: Any, encoding: Encoding) -> Any:
    """Put a large array into a list and a mark into its place."""
    if array.size <= _PIECE_ITEMS:
        return encode(array, encoding)
    arrays.append(array)
    return mark


def _array_pieces(array: Any, encoding: Encoding) -> Iterator[bytes]:
    """Yield the text of a large array: blocks of its first axis that has small items, or of its bytes."""
    if encoding == "base64":
        head, *_ = (orjson.dumps(encode(array[:0].reshape(0), encoding) | {"shape": list(array.shape)})).rsplit(b'"', 1)
        yield head
        items = array.reshape(-1)
        for start in range(0, items.size, 3 * _PIECE_ITEMS):  # a multiple of 3 bytes has no padding
            yield encode(items[start : start + 3 * _PIECE_ITEMS], encoding)["base64"].encode()
        yield b'"}'
    elif array.size <= _PIECE_ITEMS:
        yield to_json(array)
    else:
        step = max(_PIECE_ITEMS * len(array) // array.size, 1)
        for start in range(0, len(array), step):
            yield b"," if start else b"["
            block = array[start : start + step]
            if block.size <= _PIECE_ITEMS:
                yield to_json(block)[1:-1]
            else:
                yield from _array_pieces(block[0], encoding)
        yield b"]"


def fields_on_wire(model: BaseModel) -> dict[str, Any]:
    """The values of a model by their name on the wire, without the null ones. Nested values stay as they are."""
    values = model.__dict__  # what a cached property keeps there is no field
    fields = {wire: value for name, wire in _names(type(model)) if (value := values[name]) is not None}
    return fields | model.__pydantic_extra__ if model.__pydantic_extra__ else fields


@cache
def _names(model: type[BaseModel]) -> tuple[tuple[str, str], ...]:
    return tuple((name, field.alias or name) for name, field in model.model_fields.items())


def _plain(value: Any, encoding: Encoding, write: Callable[[Any, Encoding], Any] = encode) -> Any:
    if isinstance(value, np.ndarray):
        return write(value, "list" if isinstance(value, Untyped) else encoding)
    if isinstance(value, BaseModel):
        value = fields_on_wire(value)
    if isinstance(value, dict):
        return {key: _plain(item, encoding, write) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return value if are_plain(value) else [_plain(item, encoding, write) for item in value]
    return plain_scalar(value)


def are_plain(items: Sequence[Any]) -> bool:
    """True for items that orjson writes as they are, or short lists of them: texts, flags and integers of 64 bits."""
    kinds = set(map(type, items))
    if kinds <= _SHORT_LISTS:
        items = [*chain.from_iterable(filter(None, items))]
        kinds = set(map(type, items))
    return kinds <= _SCALAR_TYPES or (kinds == {int} and min(items) >= -(2**63) and max(items) < 2**64)


def plain_scalar(value: Any) -> Any:
    """A value that orjson writes: non-finite numbers as strings, integers beyond 64 bits as floats."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(value)
    return value

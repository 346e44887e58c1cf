"""JSON text to data, the numbers of its tensors read straight into arrays where simdjson is installed.

orjson makes a Python number of each, and lists of them that are then walked: three times the work. What simdjson finds
is taken only where it cannot differ from what the lists would have given; everything else, and every fault, is left to
orjson. The server installs simdjson (``pysimdjson``); a client, which mostly reads safetensors, does without.
"""

from codecs import BOM_UTF8
from functools import cache
from itertools import chain
from math import prod
from typing import Annotated, Any, get_args, get_origin

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from attention_contract.errors import InvalidRequest
from attention_contract.tensors import MAX_RANK, TensorField, Untyped
from attention_contract.validation import clip, fields_of

simdjson: Any
try:
    import simdjson
except ImportError:
    simdjson = None

Text = bytes | bytearray | memoryview

_MOST_KEYS = 64
_MOST_ITEMS = 65_536
"""Of a list that is no tensor: none may have more."""
_STEP = 2**20
"""Bytes of a text that are looked at at a time."""


def read_json(body: Text, model: type[BaseModel], brackets: int | None = None) -> dict[str, Any] | None:
    """The object that a JSON text holds, nested lists of numbers in the model's tensor fields as arrays.

    None where that cannot be told without going through the lists. Raises InvalidRequest for one of other things that
    is too long, and for unknown names among very many. ``brackets``: how many open a list, where they were counted.
    """
    text = bytes(body) if len(body) <= _STEP else body  # a copy of a large one costs more than it saves
    # An escape could hide a bracket, a byte order mark is not for us to skip.
    if simdjson is None or bytes(text[:3]) == BOM_UTF8 or _has_escapes(text):
        return None
    try:
        document = simdjson.Parser().parse(text)
        if not isinstance(document, simdjson.Object):
            return None
        _check_names(document, model)
        return _read(document, count_of("[", text) if brackets is None else brackets, _tensor_fields(model))
    except (ValueError, RuntimeError):
        return None


def _has_escapes(text: Text) -> bool:
    if isinstance(text, bytes):
        return b"\\" in text
    return any(b"\\" in bytes(text[at : at + _STEP]) for at in range(0, len(text), _STEP))


def count_of(character: str, text: Text) -> int:
    """How often an ASCII character occurs: several times as fast as ``bytes.count``, which goes byte by byte."""
    if len(text) <= _STEP:
        return int(np.count_nonzero(np.frombuffer(text, np.uint8) == ord(character)))
    return sum(count_of(character, text[at : at + _STEP]) for at in range(0, len(text), _STEP))


def _check_names(document: Any, model: type[BaseModel]) -> None:
    """Raise InvalidRequest, naming one, where there are more names than any request has, and some are unknown."""
    if len(document) <= _MOST_KEYS:
        return
    known = fields_of(model)
    unknown = next((key for key in document if key not in known), None)
    if unknown is not None:
        named = clip(unknown)
        raise InvalidRequest(f"{named}: there is no such field; remove it or check its spelling", param=named)


def _read(document: Any, brackets: int, tensors: frozenset[str]) -> dict[str, Any] | None:
    data: dict[str, Any] = {}
    lists = 0
    if len(document) > _MOST_KEYS:  # each is looked for from the beginning
        return None
    for key in document:
        if key in data:  # of equal names, the last one counts
            return None
        value = document[key]
        found = _array(value) if key in tensors and isinstance(value, simdjson.Array) else None
        if found is not None:
            data[key], count = found
        else:
            data[key], count = _plain(value, key)
        lists += count
    # Rows of the same length may still hold one list more: [3, [4]] reads like [3, 4].
    return data if lists == brackets else None


def _array(value: Any) -> tuple[NDArray[Any], int] | None:
    """Nested lists of numbers as an array, and how many lists they are; None for anything else."""
    shape, level, lists = [len(value)], [value], 1
    first = level[0][0] if level[0] else None
    while isinstance(first, simdjson.Array):
        level = list(chain.from_iterable(level))
        if len(shape) == MAX_RANK or len(level) != prod(shape):
            return None
        if set(map(type, level)) != {simdjson.Array} or len(set(map(len, level))) > 1:
            return None
        lists += len(level)
        shape.append(len(level[0]))
        first = level[0][0] if level[0] else None
    numbers = _numbers(value, integers=isinstance(first, int))
    if numbers is None or not numbers.size or numbers.size != prod(shape):
        return None
    return numbers.reshape(shape).view(Untyped), lists


def _numbers(value: Any, *, integers: bool) -> NDArray[Any] | None:
    """All numbers of nested lists: int64 where all are integers, float64 else; None where some are no numbers.

    integers: the first is one.
    """
    try:
        if integers:
            return np.frombuffer(value.as_buffer(of_type="i"), np.int64)
    except TypeError:
        pass
    except ValueError:  # an integer that does not fit
        return None
    try:
        return np.frombuffer(value.as_buffer(of_type="d"), np.float64)
    except (TypeError, ValueError):
        return None


def _plain(value: Any, key: str) -> tuple[Any, int]:
    """A value that is no tensor itself, and how many opening brackets its text has."""
    if isinstance(value, simdjson.Array):
        if len(value) > _MOST_ITEMS:
            raise InvalidRequest(f"{clip(key)}: expected at most {_MOST_ITEMS} items", param=clip(key))
        return value.as_list(), value.mini.count(b"[")
    if isinstance(value, simdjson.Object):
        return value.as_dict(), value.mini.count(b"[")
    return value, value.count("[") if isinstance(value, str) else 0


@cache
def _tensor_fields(model: type[BaseModel]) -> frozenset[str]:
    """The names on the wire of the fields that are tensors themselves."""
    return frozenset(
        field.alias or name
        for name, field in model.model_fields.items()
        if any(isinstance(each, TensorField) for each in field.metadata) or _is_tensor(field.annotation)
    )


def _is_tensor(kind: Any) -> bool:
    if get_origin(kind) is Annotated:
        return any(isinstance(each, TensorField) for each in get_args(kind)[1:])
    return get_origin(kind) not in {list, dict, tuple} and any(map(_is_tensor, get_args(kind)))

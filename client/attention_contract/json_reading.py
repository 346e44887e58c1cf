"""JSON text to data. simdjson reads the nested lists of tensor fields straight into arrays; orjson reads all else.

simdjson comes with the server's extra. Without it, orjson reads everything, with the same result.
"""

import re
import sys
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Final, get_args, get_origin

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel

from attention_contract.errors import BodyTooLarge, InvalidRequest, Unreadable
from attention_contract.tensors import MAX_RANK, TensorField, Untyped
from attention_contract.validation import clip, fields_of, members_of, suggestion

try:
    import simdjson
except ImportError:
    simdjson = None  # type: ignore[assignment,unused-ignore]

Text = bytes | bytearray | memoryview

MAX_ITEMS: Final = 2**24
"""Values in one text."""
MAX_LISTS: Final = 2**20
"""Lists and objects in one text."""
MAX_OBJECTS: Final = 2**22
"""Values that become Python objects: all but the numbers of tensors."""
MAX_DEPTH: Final = 256
"""Levels of lists and objects, one within the other. Python's own functions give up at a thousand, amid a request."""
MAX_LIST_ITEMS: Final = 65_536
"""Items of a list that is no tensor. No field takes more."""
_MAX_NAMES: Final = 64
_MAX_MAPPED: Final = 256
_CHUNK: Final = 2**17
"""Characters that are counted at a time, few enough to stay in the processor's cache."""
_NESTED: Final = frozenset({list, dict, np.ndarray, Untyped})
"""The types of values that are lists and objects, or stand for them."""
_NON_FINITE: Final = re.compile(rb"NaN|Infinity")


@dataclass(frozen=True)
class TextSize:
    """The sizes of a JSON text that bound the time and the memory of parsing it."""

    characters: int
    items: int
    """At least the number of its values."""
    lists: int
    """At least the number of its lists and objects."""
    quotes: int
    """At least the number of its strings."""

    @property
    def parsed_bytes(self) -> int:
        """Bytes that parsing holds at most, beside the text.

        The parser keeps a copy of the text, 16 bytes a value and 4 bytes a token. A value becomes 8 bytes of an array
        or up to 64 bytes of a Python object; a list takes up to 160 bytes.
        """
        objects = min(self.items, MAX_OBJECTS)
        return self.characters + 32 * self.items + 64 * objects + 160 * self.lists


def measure_text(text: Text) -> TextSize:
    """Count what parsing will have to hold, without parsing: a pass over the characters."""
    characters = np.frombuffer(text, np.uint8)
    commas = brackets = quotes = 0
    for start in range(0, len(characters), _CHUNK):
        chunk = characters[start : start + _CHUNK]
        commas += int(np.count_nonzero(chunk == 44))
        quotes += int(np.count_nonzero(chunk == 34))
        brackets += int(np.count_nonzero((chunk | 32) == 123))  # "[" is 91, "{" is 123
    return TextSize(len(characters), commas + brackets + 1, brackets, quotes)


def check_text(size: TextSize, items: int | None = None) -> None:
    """Raise BodyTooLarge for a text with too many values or lists. ``items``: another limit of values."""
    for count, limit, what in (
        (size.items, MAX_ITEMS if items is None else items, "values"),
        (size.lists, MAX_LISTS, "lists and objects"),
    ):
        if count > limit:
            raise BodyTooLarge(
                f"the JSON text has up to {count} {what}; expected at most {limit}. Send large tensors as base64 or as "
                "safetensors",
                limit=limit,
                actual=count,
            )


def from_json(text: Text, what: str = "the body") -> dict[str, Any]:
    """Read a JSON object. Raises Unreadable for any other text and calls it ``what``."""
    value = json_value(text, what)
    if not isinstance(value, dict):
        raise Unreadable(f"{what} is not a JSON object but {type(value).__name__}")
    return value


def json_value(text: Text, what: str) -> Any:
    """Read any JSON value. Raises Unreadable for a text that is none, and calls it ``what``."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as fault:
        if "depth limit" in fault.msg:
            raise _too_deep(what) from None
        near = bytes(text[max(fault.pos - 1, 0) : fault.pos + 9])
        advice = '; write NaN and Infinity as strings, as in "NaN"' if _NON_FINITE.search(near) else ""
        raise Unreadable(f"{what} is not JSON: {clip(fault.msg)} at character {fault.pos}{advice}") from None
    if len(text) > 2 * MAX_DEPTH:  # a shorter text has no room for so many brackets
        _count_lists(value, what)
    return value


def _too_deep(what: str) -> Unreadable:
    return Unreadable(f"{what} nests lists and objects more than {MAX_DEPTH} levels deep", limit=MAX_DEPTH)


def read_json(text: Text, model: type[BaseModel], size: TextSize | None = None) -> dict[str, Any]:
    """Read the JSON object of a model. Nested lists of numbers in its tensor fields become arrays.

    ``size``: of a text that must stay within the limits; without it there are none. Raises Unreadable for any other
    text, BodyTooLarge for one beyond the limits, InvalidRequest for a list that is too long or for unknown names among
    very many.
    """
    limit = sys.maxsize if size is None else MAX_OBJECTS
    size = size or measure_text(text)
    data = None if simdjson is None or not size.characters else _read_by_simdjson(text, model, size, limit)
    if data is None:
        check_objects(size.items, limit)
        data = from_json(text)
        _check_names(data, model)
        for name, value in data.items():
            if isinstance(value, list) and name not in tensor_fields(model):
                _check_length(name, len(value))
    return data


def _read_by_simdjson(text: Text, model: type[BaseModel], size: TextSize, limit: int) -> dict[str, Any] | None:
    """The data of a text; None for a text that is left to orjson, for it may be at fault."""
    if text[0] == 0xEF:  # a byte order mark, which simdjson passes over
        return None
    try:
        document = simdjson.Parser().parse(text)
    except (ValueError, RuntimeError):
        return None
    if not isinstance(document, simdjson.Object):
        return None
    _check_names(document, model)
    if _has_zero(document):
        return None
    values: dict[str, Any] = {name: document[name] for name in document}
    if len(values) < len(document):  # a name that comes twice
        return None
    maps = {name for name in tensor_maps(model) if _is_small_map(values.get(name))}
    arrays = _find_arrays(values, model, maps)
    check_objects(size.items - sum(array.size for array in arrays.values()), limit)
    data: dict[str, Any] = {}
    for name, value in values.items():
        if name in maps:
            data[name] = {key: _read(value[key], arrays.get((name, key))) for key in value}
        else:
            data[name] = _read(value, arrays.get((name, "")))
    # Flattening a row hides lists within it. They, duplicate names and brackets in strings change this count.
    return data if _count_lists(data, "the body") == size.lists else None


def _find_arrays(values: dict[str, Any], model: type[BaseModel], maps: set[str]) -> dict[tuple[str, str], NDArray[Any]]:
    """The tensors that are plain nested lists, by their field and, in these maps of tensors, by their name."""
    arrays = {}
    for name, value in values.items():
        if isinstance(value, simdjson.Array):
            if name not in tensor_fields(model):
                _check_length(name, len(value))
            elif (array := _numbers(value)) is not None:
                arrays[name, ""] = array
        elif name in maps:
            for key in value:
                if isinstance(value[key], simdjson.Array) and (array := _numbers(value[key])) is not None:
                    arrays[name, key] = array
    return arrays


def _is_small_map(value: Any) -> bool:
    """True for an object with few names. simdjson finds a name by going through all before it."""
    return isinstance(value, simdjson.Object) and len(value) <= _MAX_MAPPED and not _has_zero(value)


def _has_zero(value: Any) -> bool:
    """True for an object with a zero character in a name. simdjson looks for such a name up to that character."""
    return "\0" in "".join(value)


def _read(value: Any, array: NDArray[Any] | None) -> Any:
    if array is not None:
        return array
    if isinstance(value, simdjson.Array):
        return value.as_list()
    return value.as_dict() if isinstance(value, simdjson.Object) else value


def _numbers(value: Any) -> NDArray[Any] | None:
    """The numbers of nested lists of equal lengths; None for other lists. It misses lists within a row of numbers."""
    shape: list[int] = []
    level = [value]
    while True:
        sizes = set(map(len, level))
        size = sizes.pop()
        shape.append(size)
        if sizes or not size or len(shape) > MAX_RANK:
            return None
        first = level[0][0]
        if type(first) is not simdjson.Array:
            break
        rows = []
        for row in (row for part in level for row in part):
            if type(row) is not simdjson.Array:
                return None
            rows.append(row)
        level = rows
    kinds = {int: "id", float: "d"}.get(type(first), "")
    for kind in kinds:
        try:
            array = np.frombuffer(value.as_buffer(of_type=kind), np.int64 if kind == "i" else np.float64)
        except TypeError:  # not all are of this kind
            continue
        except ValueError:  # an integer does not fit
            return None
        return array.reshape(shape).view(Untyped) if array.size == np.prod(shape) else None
    return None


def _count_lists(value: Any, what: str) -> int:
    """Count the lists and objects. Raises Unreadable, which calls the text ``what``, if they nest too deep."""
    count, level = 0, [value]
    for depth in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, np.ndarray):
                lists = 1
                for size in item.shape[-2::-1]:  # [a, b, c] is one list of a lists of b lists
                    lists = 1 + size * lists
                count += lists
            elif isinstance(item, list | dict):
                if depth == MAX_DEPTH:
                    raise _too_deep(what)
                count += 1
                items = item.values() if isinstance(item, dict) else item
                if not _NESTED.isdisjoint(map(type, items)):
                    below += items
        if not below:
            break
        level = below
    return count


def check_objects(count: int, limit: int = MAX_OBJECTS) -> None:
    """Raise BodyTooLarge for a text with more values that become Python objects."""
    if count > limit:
        raise BodyTooLarge(
            f"the JSON text has up to {count} values that are not plain numbers of a tensor; expected at most {limit}. "
            "Send large tensors as base64 or as safetensors",
            limit=limit,
            actual=count,
        )


def _check_length(name: str, length: int) -> None:
    if length > MAX_LIST_ITEMS:
        raise InvalidRequest.at(clip(name), f"expected at most {MAX_LIST_ITEMS} items")


def _check_names(data: Any, model: type[BaseModel]) -> None:
    """Raise InvalidRequest for an unknown name if there are more names than any request has."""
    if len(data) <= _MAX_NAMES:
        return
    known = fields_of(model)
    unknown = next((name for name in data if name not in known), None)
    if unknown is not None:
        named = clip(unknown)
        raise InvalidRequest.at(named, f"there is no such field; {suggestion(unknown, known)}")


@cache
def tensor_fields(model: type[BaseModel]) -> frozenset[str]:
    """The names on the wire of the fields that are tensors themselves."""
    return frozenset(
        field.alias or name
        for name, field in model.model_fields.items()
        if any(isinstance(annotation, TensorField) for annotation in field.metadata) or _is_tensor(field.annotation)
    )


@cache
def tensor_maps(model: type[BaseModel]) -> frozenset[str]:
    """The fields that map names to tensors."""
    return frozenset(name for name, kind in fields_of(model).items() if any(map(is_tensor_map, members_of(kind))))


def is_tensor_map(kind: Any) -> bool:
    """True for the type of a map from names to tensors."""
    return get_origin(kind) is dict and _is_tensor(get_args(kind)[1])


def _is_tensor(kind: Any) -> bool:
    if get_origin(kind) is Annotated:
        return any(isinstance(annotation, TensorField) for annotation in get_args(kind)[1:])
    return get_origin(kind) not in {list, dict, tuple} and any(map(_is_tensor, get_args(kind)))

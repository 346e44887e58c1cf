"""Requests to whole models with one value that is wrong, at each place that the contract's schemas have.

A request that is answered as it stands is the seed. Each field of its schema, nested ones too, that the seed has or
leaves out, gets values of every JSON type, and others made of its own: cut, doubled, repeated, moved, unknown.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from tools.fuzz.damaged_values import entry_at, removed, replaced

from attention_contract.base import WireModel

Schema = Mapping[str, Any]
Place = tuple[str | int, ...]
VALUES: Final = (
    None, True, -1, 0, 1.5, 2**31 - 1, 2**53, 1e308, "NaN", "-Infinity", "", "x", "\0", "../net", "9" * 5000,
    [], [1], [[1]], ["x", 1], [None], [-1], [3, 3], [0] * 70_000, {}, {"a": 1}, {"": None},
    {"dtype": "float32", "shape": [2**40, 0], "data": []}, {"dtype": "float32", "shape": [2**16, 2**16], "base64": ""},
    {"dtype": "int64", "shape": [2], "data": [1, 2]}, {"dtype": "float32", "shape": [1] * 40 + [7], "data": [0] * 7},
    ["NaN", 1.0], [1e308] * 64, [[1.0, 2.0], [3.0]],
)  # fmt: skip
"""Values of every JSON type, and tensors: of no and of too many bytes, of another dtype, of other sizes, not finite."""
_LEFT_OUT: Final = object()


class BadRequest(NamedTuple):
    """A request with one wrong value, or with one left out."""

    place: Place
    value: Any
    body: dict[str, Any]

    def __str__(self) -> str:
        value = "(left out)" if self.value is _LEFT_OUT else repr(self.value)[:60]
        return f"{'.'.join(map(str, self.place))} = {value}"


def bad_requests(request: type[WireModel], seed: Mapping[str, Any]) -> Iterator[BadRequest]:
    """The seed with each wrong value at each place of the schema of the request."""
    schema = request.model_json_schema()
    for place in dict.fromkeys(_places(schema, schema, seed)):
        if not place:
            continue
        values = [*VALUES]
        try:
            values += _others(entry_at(seed, place))
        except (KeyError, IndexError):
            pass
        else:
            yield BadRequest(place, _LEFT_OUT, removed(seed, place))
        for value in values:
            yield BadRequest(place, value, replaced(seed, place, value))


def _others(own: Any) -> Iterator[Any]:
    """Values of the same type that may not fit what is beside them."""
    match own:
        case bool():
            yield not own
        case int() | float():
            yield from (-own - 1, own + 10**6, own + 0.5)
        case str():
            yield from (own[:-1], own + own, "f" * len(own), own + "\0", own * 2000)
        case list() if own:
            yield from (own[:-1], [own[0]] * len(own), own + own, [own], [*own, None], own * 300)
        case dict() if own:
            yield own | {"unknown": 1}
            yield {f"{key}0": value for key, value in own.items()}


def _places(schema: Schema, whole: Schema, value: Any, place: Place = ()) -> Iterator[Place]:
    """Each place of a value, and each that its schema has beside it."""
    yield place
    for kind in _kinds(schema, whole):
        if isinstance(value, dict):
            fields = kind.get("properties", {})
            yield from ((*place, name) for name in fields if name not in value)
            named = [*kind.get("patternProperties", {}).values(), kind.get("additionalProperties")]
            for name, inner in value.items():
                known = fields.get(name, named[0])
                yield from _places(known if isinstance(known, dict) else {}, whole, inner, (*place, name))
        elif isinstance(value, list):
            for index in sorted({0, len(value) - 1} if value else ()):
                yield from _places(kind.get("items", {}), whole, value[index], (*place, index))


def _kinds(schema: Schema, whole: Schema) -> Iterator[Schema]:
    """The schemas of a union, references followed."""
    if "$ref" in schema:
        yield from _kinds(whole["$defs"][schema["$ref"].rpartition("/")[2]], whole)
    elif inner := schema.get("anyOf", schema.get("oneOf")):
        for kind in inner:
            yield from _kinds(kind, whole)
    else:
        yield schema

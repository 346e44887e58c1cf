"""Tensors of a safetensors file in their places: a dotted name such as ``edits.0.value`` is a path in the data."""

from functools import cache
from typing import Any, get_origin

from numpy.typing import NDArray
from pydantic import BaseModel

from attention_contract.errors import InvalidTensor
from attention_contract.validation import clip, fields_of, members_of


def place_tensor(data: dict[str, Any], name: str, array: NDArray[Any], model: type[BaseModel]) -> None:
    """Put a tensor where its name says. Names within a field that maps names to tensors may hold dots.

    Raises InvalidTensor if there is no such place, or if it is taken.
    """
    field, dot, rest = name.partition(".")
    node: Any = data
    *path, last = [field, rest] if dot and field in _maps(model) else name.split(".")
    for part in path:
        node = _child(node, part)
    if not isinstance(node, dict):
        param = clip(name)
        raise InvalidTensor.at(param, "the request has no place for a tensor of this name")
    if last in node:
        param = clip(name)
        raise InvalidTensor.at(param, "it is given twice; send it as a tensor or in the metadata")
    node[last] = array


def _child(node: Any, part: str) -> Any:
    if isinstance(node, dict):
        return node.setdefault(part, {})
    if isinstance(node, list) and part.isdecimal() and len(part) < 10 and int(part) < len(node):
        return node[int(part)]
    return None


@cache
def _maps(model: type[BaseModel]) -> frozenset[str]:
    """The fields of a model that map names to tensors."""
    return frozenset(
        name for name, kind in fields_of(model).items() if any(get_origin(m) is dict for m in members_of(kind))
    )

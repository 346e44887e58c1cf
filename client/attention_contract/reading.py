"""JSON text to data, the numbers of its tensors read straight into arrays where ``lists`` is loaded."""

from functools import cache
from typing import Annotated, Any, Final, get_args, get_origin

import orjson
from pydantic import BaseModel

from attention_contract import lists
from attention_contract.errors import InvalidRequest
from attention_contract.tensors import TensorField, Untyped
from attention_contract.validation import clip, fields_of

_MOST_KEYS: Final = 64
_MOST_ITEMS: Final = 65_536
"""Of a list that is no tensor: none may have more."""


def read_json(text: lists.Text, model: type[BaseModel]) -> dict[str, Any] | None:
    """The object that a JSON text holds, nested lists of numbers in the model's tensor fields as arrays.

    None where that cannot be told without going through the lists. Raises InvalidRequest for one of other things that
    is too long, and for unknown names among very many.
    """
    divided = lists.divide(text)
    return None if divided is None else joined(divided, model)


def joined(divided: lists.Divided, model: type[BaseModel]) -> dict[str, Any] | None:
    """As ``read_json``, of a text that was divided."""
    try:
        data = orjson.loads(divided.rest)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(data, dict):
        return None
    _check_names(data, model)
    tensors = _tensor_fields(model)
    for name, value in data.items():
        if type(value) is list:
            array = divided.arrays[value[0]] if len(value) == 1 and type(value[0]) is int else None
            if array is None or name not in tensors:
                if len(value if array is None else array) > _MOST_ITEMS:
                    raise InvalidRequest(f"{clip(name)}: expected at most {_MOST_ITEMS} items", param=clip(name))
                data[name] = value if array is None else array.tolist()
            else:
                data[name] = array.view(Untyped)
    return data


def _check_names(data: dict[str, Any], model: type[BaseModel]) -> None:
    """Raise InvalidRequest, naming one, where there are more names than any request has, and some are unknown."""
    if len(data) <= _MOST_KEYS:
        return
    known = fields_of(model)
    unknown = next((name for name in data if name not in known), None)
    if unknown is not None:
        named = clip(unknown)
        raise InvalidRequest(f"{named}: there is no such field; remove it or check its spelling", param=named)


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

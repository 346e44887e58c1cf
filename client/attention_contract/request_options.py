"""Requests apart from their tensors: their options. Equal texts are parsed and validated once."""

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from attention_contract.base import assembled
from attention_contract.json_reading import from_json
from attention_contract.tensor_places import place_tensor
from attention_contract.tensors import DTYPES, FLOATS, Untyped
from attention_contract.validation import validate

MAX_TEXT: Final = 4096
"""Characters of a text that is remembered."""
MAX_TENSORS: Final = 16
KNOWN: Final = 1024
"""Texts that are remembered. The least recently used goes first."""
UNTYPED: Final = "untyped"
"""The dtype of nested lists of floating-point numbers."""
_PLAIN: Final = FLOATS | {"bool", UNTYPED}
"""Dtypes whose tensors every field takes as they are, or never."""
ModelT = TypeVar("ModelT", bound=BaseModel)


class Shaped(NamedTuple):
    """A tensor without its numbers."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def remembered_options(model: type[BaseModel], text: str, tensors: tuple[Shaped, ...]) -> Any:
    """The request of an options text with some array in the place of each tensor.

    None if validation looks at numbers, or if there is too much to remember. Raises what reading the request raises.
    """
    if len(text) > MAX_TEXT or len(tensors) > MAX_TENSORS:
        return None
    fields = _fields(model)
    for name, dtype, _ in tensors:
        if dtype not in _PLAIN or name not in fields:
            return None
    return parsed_options(model, text, tuple([each[:2] for each in tensors]))


def with_tensors(options: ModelT, tensors: Mapping[str, NDArray[Any]]) -> ModelT:
    """The request of these options with tensors in their places. Both share all else, which nobody changes."""
    stated = options.__pydantic_fields_set__
    return assembled(
        type(options),
        {**options.__dict__, **tensors},
        stated if tensors.keys() <= stated else stated | tensors.keys(),
    )


@lru_cache(maxsize=KNOWN)
def parsed_options(model: type[BaseModel], text: str, tensors: tuple[tuple[str, str], ...]) -> Any:
    """The request that an options text describes, with some array in the place of each tensor.

    ``tensors``: the field and dtype of each. Raises what reading the request itself raises for these.
    """
    data = from_json(text.encode(), "the metadata entry 'request'")
    for name, dtype in tensors:
        # An empty list would be taken for a tensor of any dtype.
        shape = (1,) if dtype == UNTYPED else (0,)
        place_tensor(data, name, _blank(Shaped(name, dtype, shape)), model)
    return validate(model, data, by_name=False)


@cache
def _fields(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(model.model_fields)


def _blank(tensor: Shaped) -> NDArray[Any]:
    """An array of this shape over a single number: NaN, which no check of numbers takes for right."""
    dtype = np.dtype(np.float64) if tensor.dtype == UNTYPED else DTYPES[tensor.dtype]
    number = np.zeros((), dtype) if dtype.kind == "b" else np.full((), np.nan, dtype)
    array = np.broadcast_to(number, tensor.shape)
    return array.view(Untyped) if tensor.dtype == UNTYPED else array

"""The options of a request: all it says beside its tensors. Equal texts are parsed and validated once."""

from functools import lru_cache
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from attention_contract.json_reading import from_json
from attention_contract.tensor_places import place_tensor
from attention_contract.tensors import DTYPES
from attention_contract.validation import validate

MAX_TEXT: Final = 4096
"""Characters of a text that is remembered."""
MAX_TENSORS: Final = 16
ModelT = TypeVar("ModelT", bound=BaseModel)
KNOWN: Final = 1024
"""Texts that are remembered. The one that was not used for longest goes first."""


@lru_cache(maxsize=KNOWN)
def parsed_options(model: type[BaseModel], text: str, tensors: tuple[tuple[str, str], ...]) -> Any:
    """The request that an options text describes, with an empty array in the place of each tensor.

    ``tensors``: the field and dtype of each. Raises what reading the request itself raises for these.
    """
    data = from_json(text.encode(), "the metadata entry 'request'")
    for name, dtype in tensors:
        place_tensor(data, name, np.empty(0, DTYPES[dtype]), model)
    return validate(model, data, by_name=False)


def with_tensors(options: ModelT, tensors: dict[str, NDArray[Any]]) -> ModelT:
    """The request of these options with tensors in their places.

    Both share all else, which nobody changes. ``model_copy`` does the same in three times the time.
    """
    request = object.__new__(type(options))
    put = object.__setattr__  # the models are frozen
    put(request, "__dict__", options.__dict__ | tensors)
    put(request, "__pydantic_fields_set__", options.__pydantic_fields_set__)
    put(request, "__pydantic_extra__", None)
    put(request, "__pydantic_private__", None)
    return request

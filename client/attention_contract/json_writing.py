"""Data to JSON text. Tensors are nested lists or objects with base64; non-finite numbers are strings."""

import math
from functools import cache
from typing import Any

import numpy as np
import orjson
from pydantic import BaseModel

from attention_contract.tensors import Encoding, Untyped, encode


def to_json(value: Any, encoding: Encoding = "list") -> bytes:
    """A model, or a value of mappings, lists, numbers and arrays, as JSON text. Unset and null fields are left out."""
    return orjson.dumps(_plain(value, encoding), option=orjson.OPT_SERIALIZE_NUMPY)


def fields_on_wire(model: BaseModel) -> dict[str, Any]:
    """The values of a model by their name on the wire, without the null ones. Nested values stay as they are."""
    values = model.__dict__  # what a cached property keeps there is no field
    found = {wire: value for name, wire in _names(type(model)) if (value := values[name]) is not None}
    return found | model.__pydantic_extra__ if model.__pydantic_extra__ else found


@cache
def _names(model: type[BaseModel]) -> tuple[tuple[str, str], ...]:
    return tuple((name, field.alias or name) for name, field in model.model_fields.items())


def _plain(value: Any, encoding: Encoding) -> Any:
    if isinstance(value, np.ndarray):
        return encode(value, "list" if isinstance(value, Untyped) else encoding)
    if isinstance(value, BaseModel):
        value = fields_on_wire(value)
    if isinstance(value, dict):
        return {key: _plain(item, encoding) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, encoding) for item in value]
    return plain_scalar(value)


def plain_scalar(value: Any) -> Any:
    """A value that orjson writes: non-finite numbers as strings, integers beyond 64 bits as floats."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(value)
    return value

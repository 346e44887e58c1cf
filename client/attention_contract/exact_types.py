"""Numbers and flags as JSON has them: pydantic's own conversions take ``true`` for 1, and text for a number."""

from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field
from pydantic_core import CoreSchema, PydanticKnownError
from pydantic_core.core_schema import no_info_before_validator_function

Index = Annotated[int, Field(ge=0, lt=2**31)]
"""An index from 0 of a head, a query, a key or a layer."""
_NON_FINITE: Final = frozenset({"NaN", "Infinity", "-Infinity"})
"""Text for the values that are no JSON numbers."""


def exact(schema: CoreSchema, model: type) -> Any:
    """Return the schema of a model whose own fields refuse flags for numbers, numbers for flags, and text for both."""
    return _exact(schema, model)


def _exact(schema: Any, model: type) -> Any:
    if isinstance(schema, list):
        return [_exact(member, model) for member in schema]
    if not isinstance(schema, dict) or "type" not in schema or schema.get("cls", model) is not model:
        return schema  # other models, and tagged unions of them, have schemas of their own
    if schema["type"] in _CHECKS:
        return no_info_before_validator_function(_CHECKS[schema["type"]], schema)
    if schema["type"] == "model-fields":
        return {**schema, "fields": {name: _exact(field, model) for name, field in schema["fields"].items()}}
    return {key: _exact(value, model) if key in _WITHIN else value for key, value in schema.items()}


_WITHIN: Final = frozenset({"schema", "choices", "items_schema", "values_schema"})
"""The keys of a schema under which there are others."""


def _flag(value: Any) -> Any:
    if not isinstance(value, bool | np.bool_):
        raise PydanticKnownError("bool_type")
    return value


def _whole(value: Any) -> Any:
    if isinstance(value, bool | np.bool_ | str | bytes):
        raise PydanticKnownError("int_type")
    return value


def _real(value: Any) -> Any:
    if isinstance(value, bool | np.bool_ | bytes) or (isinstance(value, str) and value not in _NON_FINITE):
        raise PydanticKnownError("float_type")
    return value


_CHECKS: Final = {"bool": _flag, "int": _whole, "float": _real}

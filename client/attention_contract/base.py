"""The base of everything on the wire."""

from typing import Annotated, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

ItemT = TypeVar("ItemT")
Listed: TypeAlias = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list in a request. Validation stops at the first item at fault."""


AT_FAULT = "field_at_fault"
"""The type of the errors that ``at_fault`` makes."""


def at_fault(field: str, message: str) -> PydanticCustomError:
    """The error of a check of several fields: the field to change, and the reason."""
    return PydanticCustomError(AT_FAULT, "{message}", {"field": field, "message": message})


class WireModel(BaseModel):
    """A value on the wire: immutable, strict about unknown fields, documented by its attribute docstrings."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        arbitrary_types_allowed=True,
        use_attribute_docstrings=True,
        serialize_by_alias=True,
        validate_by_name=True,
        validate_by_alias=True,
        protected_namespaces=(),
        ser_json_inf_nan="strings",
    )

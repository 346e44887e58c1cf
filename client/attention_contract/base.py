"""The base of everything on the wire."""

from typing import Annotated, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field

ItemT = TypeVar("ItemT")
Listed: TypeAlias = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list in a request: no item is looked at after the first that is wrong, for a refusal names few of them."""


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

"""The base of everything on the wire."""

from pydantic import BaseModel, ConfigDict


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

"""The base of everything on the wire."""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Optional, TypeAlias, TypeVar, cast, get_args

from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError

from attention_contract.descriptions import described
from attention_contract.drawings import drawing_module
from attention_contract.exact_types import exact
from attention_contract.reply_names import Names
from attention_contract.short_repr import short_repr

ItemT = TypeVar("ItemT")
ModelT = TypeVar("ModelT", bound=BaseModel)
Listed: TypeAlias = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list in a request. Validation stops at the first item at fault."""


if TYPE_CHECKING:
    IfRequested = Annotated[ItemT, "asked for"]
else:
    IfRequested = Optional
"""The type of a reply's field that comes if it was asked for: for a type checker, the one that it has then."""
ABSENT: Final[Any] = None
"""The value of such a field if it was not asked for."""
AT_FAULT = "field_at_fault"
"""The type of the errors that ``at_fault`` makes."""


def at_fault(field: str, message: str) -> PydanticCustomError:
    """The error of a check of several fields: the field to change, and the reason."""
    return PydanticCustomError(AT_FAULT, "{message}", {"field": field, "message": message})


class WireModel(BaseModel):
    """A value on the wire: immutable, strict about unknown fields, documented by its attribute docstrings."""

    __slots__ = ("_names", "_request_id")

    reads_text: ClassVar[bool] = False
    """True for the fields of a query string, where numbers and flags are text."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        arbitrary_types_allowed=True,
        defer_build=True,  # a command that sends one request needs the schemas of two or three
        serialize_by_alias=True,
        validate_by_name=True,
        validate_by_alias=True,
        protected_namespaces=(),
        ser_json_inf_nan="strings",
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Refuse flags for numbers and numbers for flags in all fields, which are described by their docstrings."""
        described(cls)
        schema = handler(source)
        return schema if cls.reads_text else cast("CoreSchema", exact(schema, cls))

    @property
    def request_id(self) -> str | None:
        """Id of the request that this is the reply to, as in the server's log; None for what is no reply."""
        return cast("str | None", getattr(self, "_request_id", None))

    @property
    def request_names(self) -> Names:
        """The names that the request of this reply states for what it has numbers of; the client keeps them."""
        return getattr(self, "_names", None) or Names()

    def __repr__(self) -> str:
        return short_repr(self)

    __str__ = __repr__

    def _repr_html_(self) -> str | None:
        """The maps of this value as a notebook shows them, or a table of its fields."""
        shown: str = drawing_module("notebook").notebook_html(self)
        return shown


def build_schemas(model: type[BaseModel] = WireModel) -> None:
    """Build the schemas of all models now, as a server does before its first request, and not with the first use.

    What is made of the models from then on, such as the adapters of FastAPI, is not deferred either: FastAPI silences
    a warning of pydantic about them only while it makes them.
    """
    for subclass in model.__subclasses__():
        subclass.model_config["defer_build"] = False
        subclass.model_rebuild()
        build_schemas(subclass)


def valid(model: type[ModelT], values: dict[str, Any]) -> ModelT:
    """Make a model of values that are known to be valid, which takes a fifth of the time.

    ``values``: by field, those of a nested model as a dictionary; the others have their defaults, which nobody changes.
    """
    made = _defaults(model) | values
    for name, nested in _nested(model):
        if isinstance(value := made[name], dict):
            made[name] = valid(nested, value)
    return assembled(model, made, set(values))


def assembled(model: type[ModelT], values: dict[str, Any], stated: set[str]) -> ModelT:
    """Make a model of all its values, unchecked. ``stated``: the fields that do not have their defaults."""
    made = object.__new__(model)
    put = object.__setattr__  # the models are frozen
    put(made, "__dict__", values)
    put(made, "__pydantic_fields_set__", stated)
    put(made, "__pydantic_extra__", None)
    put(made, "__pydantic_private__", None)
    return made


def with_tensors(options: ModelT, tensors: Mapping[str, NDArray[Any]]) -> ModelT:
    """The request of these options with tensors in their places. Both share all else, which nobody changes."""
    return assembled(type(options), {**options.__dict__, **tensors}, options.model_fields_set | tensors.keys())


@cache
def _nested(model: type[BaseModel]) -> tuple[tuple[str, type[BaseModel]], ...]:
    """The fields of a model that hold another one, as they are or if they are there."""
    kinds = [
        (name, kind)
        for name, field in model.model_fields.items()
        for kind in get_args(field.annotation) or (field.annotation,)
    ]
    return tuple((name, kind) for name, kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))


@cache
def _defaults(model: type[BaseModel]) -> dict[str, Any]:
    return {  # all fields, which keeps their order
        name: None if field.is_required() else field.get_default(call_default_factory=True)
        for name, field in model.model_fields.items()
    }

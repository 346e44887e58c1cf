"""From data to models, and from pydantic's complaints to the contract's errors."""

from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from attention_contract.base import AT_FAULT
from attention_contract.errors import InvalidRequest, InvalidTensor

ModelT = TypeVar("ModelT", bound=BaseModel)
_MOST_FAULTS = 1024
"""Each is gone through before the first is told."""


def validate(model: type[ModelT], data: Any, *, by_name: bool = True) -> ModelT:
    """The model that the data stands for. Raises InvalidRequest or InvalidTensor, naming the first field at fault.

    ``by_name``: take ``return_`` for ``return``, as Python writes it; the wire knows one spelling.
    """
    try:
        return model.model_validate(data, by_alias=True, by_name=by_name)
    except ValidationError as fault:
        if (count := fault.error_count()) > _MOST_FAULTS:
            raise InvalidRequest(f"{count} fields are wrong or unknown, too many to name", count=count) from None
        raise _as_contract_error(fault, model) from None


def clip(text: str, limit: int = 80) -> str:
    """The text, cut where it is longer than this: what came is never echoed whole."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def members_of(kind: Any) -> list[Any]:
    """The types of a union, None left out; of anything else, itself."""
    if get_origin(kind) is Annotated:
        return members_of(get_args(kind)[0])
    if get_origin(kind) in {Union, UnionType}:
        return [member for option in get_args(kind) for member in members_of(option) if member is not type(None)]
    return [kind]


def fields_of(kind: Any) -> dict[str, Any]:
    """The types of a model's fields, by their name on the wire."""
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return {}
    return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}


def _path(location: tuple[int | str, ...], kind: Any) -> str:
    """The dotted path of a field. Pydantic also names the member of a union that it tried, which is no field."""
    path = []
    for part in location:
        members = members_of(kind)
        if len(members) > 1:
            labels = {str(_name_of(member)): member for member in members}
            kind = labels.get(str(part))
            continue
        path.append(clip(str(part)))
        items = get_args(members[0])
        kind = items[-1] if get_origin(members[0]) in {list, dict} else fields_of(members[0]).get(str(part))
    return clip(".".join(path), 200)


def _name_of(member: Any) -> Any:
    """What pydantic calls a member of a union: the tag of a tagged one, else the type's name."""
    name = member.model_fields.get("name") if fields_of(member) else None
    return member.__name__ if name is None else name.default


def _place(error: ErrorDetails, model: type[BaseModel]) -> str | None:
    """The field that one of pydantic's errors is about; None for the whole."""
    path = [_path(error["loc"], model)]
    if error["type"] == AT_FAULT:
        path.append(error["ctx"]["field"])
    return ".".join(filter(None, path)) or None


def _items(told: dict[str, Any]) -> str:
    """How many there may be, and how many there are where that was counted."""
    most = "max_length" in told
    limit = f"at most {told['max_length']}" if most else f"at least {told['min_length']}"
    return limit if told.get("actual_length") is None else f"{limit}, got {told['actual_length']}"


def _as_contract_error(fault: ValidationError, model: type[BaseModel]) -> InvalidRequest:
    errors = fault.errors(include_url=False, include_input=False)
    first = errors[0]
    param = _place(first, model)
    others = [place for error in errors[1:9] if (place := _place(error, model))]
    facts: dict[str, Any] = {"also": others} if others else {}
    message = clip(first["msg"].removeprefix("Value error, "), 300)
    context = first.get("ctx", {})
    if first["type"] == "extra_forbidden":
        message = "there is no such field; remove it or check its spelling"
    elif first["type"] == "missing":
        message = "this field is required"
    elif first["type"] == "union_tag_invalid":
        message = f"unknown name {clip(str(context['tag']), 40)!r}; expected one of {context['expected_tags']}"
    elif first["type"] in {"too_short", "too_long"}:
        message = f"expected {_items(context)}"
    elif first["type"] in {"model_type", "model_attributes_type"}:
        message = "expected an object"
    elif first["type"] == "union_tag_not_found":
        message = 'expected an object with a "name"'
    detail = f"{param}: {message}" if param else message
    if first["type"] == "invalid_tensor":
        return InvalidTensor(detail, param=param, **facts)
    return InvalidRequest(detail, param=param, **facts)

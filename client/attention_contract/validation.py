"""Data to models, and pydantic's errors to the contract's."""

import re
from collections import Counter
from collections.abc import Iterable
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from attention_contract.base import AT_FAULT
from attention_contract.errors import InvalidRequest, InvalidTensor

ModelT = TypeVar("ModelT", bound=BaseModel)
_MOST_FAULTS = 1024
"""Errors of one request that are formatted."""
_SENTENCES: Final = [
    (re.compile(r"^String should have at least 1 character$"), "expected at least 1 character; it is empty"),
    (re.compile(r"^String should match pattern "), "expected a string of the pattern "),
    (re.compile(r"^\w+ should have "), "expected "),
    (re.compile(r"^Input should be (?=greater|less)"), "expected a number "),
    (re.compile(r"^Input should be "), "expected "),
]
"""The beginnings of pydantic's messages, and those of the contract."""


def validate(model: type[ModelT], data: Any, *, by_name: bool = True) -> ModelT:
    """Make a model of data. Raises InvalidRequest or InvalidTensor, naming the first field at fault.

    ``by_name``: take ``return_`` for ``return``, as Python writes it; the wire knows one spelling.
    """
    try:
        return model.model_validate(data, by_alias=True, by_name=by_name)
    except ValidationError as fault:
        if (count := fault.error_count()) > _MOST_FAULTS:
            raise InvalidRequest(f"{count} fields are wrong or unknown, too many to name", count=count) from None
        raise _as_contract_error(fault, model) from None


def clip(text: str, limit: int = 80) -> str:
    """The text, cut at this length. No message repeats a long input."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def suggestion(name: str, known: Iterable[str]) -> str:
    """Advice for a name that is unknown: the one that was probably meant."""
    close = get_close_matches(name[:80], known, 1)
    return f"did you mean {close[0]!r}?" if close else "remove it or check its spelling"


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
    if not kind.__pydantic_fields_complete__:  # a schema that was not built yet may name types that came after it
        kind.model_rebuild()
    return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}


def _walk(location: tuple[int | str, ...], kind: Any) -> tuple[list[str], Any]:
    """The parts of a field's path, by its names on the wire, and the type that it leads to.

    Pydantic also names the member of a union that it tried, which is no field, and a field by its name in Python if it
    was given so.
    """
    path = []
    for at, part in enumerate(location):
        if part == "[key]":  # pydantic's place of a wrong name in a mapping
            continue
        members = members_of(kind)
        if len(members) > 1:
            kind = _member(members, str(part), location[at + 1 :])
            continue
        path.append(_alias(members[0], str(part)))
        items = get_args(members[0])
        kind = items[-1] if get_origin(members[0]) in {list, dict} else fields_of(members[0]).get(path[-1])
    return path, kind


def _member(members: list[Any], name: str, rest: tuple[int | str, ...]) -> Any:
    """The member of a union that has this name, or else the only one that has the next part of the path; or None."""
    named = [member for member in members if str(_name_of(member)) == name]
    fitting = [member for member in members if rest and _has(member, rest[0])]
    return next(iter(named or (fitting if len(fitting) == 1 else ())), None)


def _has(kind: Any, part: int | str) -> bool:
    """True if this is an item of a list, or a field of a model."""
    return get_origin(kind) is list if isinstance(part, int) else part in fields_of(kind)


def _alias(kind: Any, name: str) -> str:
    """The name on the wire of a field that Python names so."""
    field = kind.model_fields.get(name) if fields_of(kind) else None
    return name if field is None else field.alias or name


def _name_of(member: Any) -> Any:
    """Pydantic's name of a member of a union: the tag of a tagged one, else the type's name."""
    name = member.model_fields.get("name") if fields_of(member) else None
    return member.__name__ if name is None else name.default


def _place(error: ErrorDetails, model: type[BaseModel]) -> str | None:
    """The field that one of pydantic's errors is about; None for the whole."""
    path = [clip(part) for part in _walk(error["loc"], model)[0]]
    if error["type"] == AT_FAULT:
        path.append(error["ctx"]["field"])
    return clip(".".join(path), 200) or None


def _items(context: dict[str, Any]) -> str:
    """The allowed number of items, and the actual one if it was counted."""
    most = "max_length" in context
    limit = f"at most {context['max_length']}" if most else f"at least {context['min_length']}"
    return limit if context.get("actual_length") is None else f"{limit}, got {context['actual_length']}"


def _first(errors: list[ErrorDetails], model: type[BaseModel]) -> ErrorDetails:
    """The error to tell: the first, or that of the member of its union that fits the data best."""
    first = errors[0]
    depth = next((at for at in range(len(first["loc"])) if _is_union(first["loc"][:at], model)), None)
    if depth is None:
        return first
    tried = [error for error in errors if error["loc"][:depth] == first["loc"][:depth] and len(error["loc"]) > depth]
    faults = Counter(error["loc"][depth] for error in tried)
    if len(faults) == 1:
        return first
    return min(
        tried, key=lambda fault: (_is_of_other_kind(fault), len(fault["loc"]) == depth + 1, faults[fault["loc"][depth]])
    )


def _is_union(location: tuple[int | str, ...], model: type[BaseModel]) -> bool:
    """True if pydantic names a member of a union behind this place."""
    return len(members_of(_walk(location, model)[1])) > 1


def _is_of_other_kind(error: ErrorDetails) -> bool:
    """True if the data is not of the kind that was tried, such as a list in place of a text."""
    unlike = error["type"] == "literal_error" and not isinstance(error["input"], str)
    return unlike or error["type"] in {"missing", "extra_forbidden"} or error["type"].endswith("_type")


def _as_contract_error(fault: ValidationError, model: type[BaseModel]) -> InvalidRequest:
    errors = fault.errors(include_url=False)
    first = _first(errors, model)
    param = _place(first, model)
    rest = [error for error in errors[:9] if error is not first][:8]
    others = [place for error in rest if (place := _place(error, model))]
    facts: dict[str, Any] = {"also": others} if others else {}
    message = _message(first, errors, model)
    detail = f"{param}: {message}" if param else message
    if first["type"] == "invalid_tensor":
        return InvalidTensor(detail, param=param, **facts)
    return InvalidRequest(detail, param=param, **facts)


def _message(error: ErrorDetails, errors: list[ErrorDetails], model: type[BaseModel]) -> str:
    """One of pydantic's errors in the contract's words. What came is never repeated whole."""
    context = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            *inside, name = error["loc"]
            known = fields_of(members_of(_walk(tuple(inside), model)[1])[0])
            message = f"there is no such field; {suggestion(str(name), known)}"
        case "missing":
            message = f"this field is required{_misspelt(error, errors)}"
        case "literal_error":
            message = _unknown_value(error["input"], context["expected"] + _or_list(error, errors))
        case "union_tag_invalid":
            message = f"unknown name {clip(str(context['tag']), 40)!r}; expected one of {context['expected_tags']}"
        case "too_short" | "too_long":
            message = f"expected {_items(context)}"
        case "model_type" | "model_attributes_type":
            message = "expected an object"
        case "union_tag_not_found":
            message = 'expected an object with a "name"'
        case _:
            message = clip(_sentence(error["msg"].removeprefix("Value error, ")), 300)
    return message


def _sentence(message: str) -> str:
    """A message of pydantic's as what was expected."""
    for pattern, words in _SENTENCES:
        message = pattern.sub(words, message)
    return message


def _misspelt(missing: ErrorDetails, errors: list[ErrorDetails]) -> str:
    """Advice if an unknown field beside a missing one is spelled like it."""
    *inside, name = missing["loc"]
    unknown = [e["loc"][-1] for e in errors if e["type"] == "extra_forbidden" and [*e["loc"][:-1]] == inside]
    close = get_close_matches(str(name), [clip(str(unknown_name)) for unknown_name in unknown], 1)
    return f"; there is no field {close[0]!r}, did you mean {name!r}?" if close else ""


def _or_list(error: ErrorDetails, errors: list[ErrorDetails]) -> str:
    """The other member of a union of words and a list."""
    place = error["loc"][:-1]
    return ", or a list" if any(e["type"] == "list_type" and e["loc"][:-1] == place for e in errors) else ""


def _unknown_value(given: Any, expected: str) -> str:
    if not isinstance(given, str):
        return f"expected one of {expected}"
    close = get_close_matches(given[:80], re.findall(r"'([^']*)'", expected), 1)
    meant = f"did you mean {close[0]!r}? Expected" if close else "expected"
    return f"unknown {clip(given, 40)!r}; {meant} one of {expected}"

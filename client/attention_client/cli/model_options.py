"""Options of a command from the fields of a request: each has the name, the type and the docstring of its field.

The request checks the value of an option. The items of a list are checked at the option, which a refusal of the request
could not name.
"""

import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.markup import escape

from attention_client.cli import completion
from attention_client.cli.tensor_arguments import read, read_all, read_json, read_object
from attention_contract.schemas.attention import Tap
from attention_contract.validation import members_of

Fields = dict[str, Any]
"""Request fields by name."""


@dataclass(frozen=True)
class Form:
    """The form of an option: what it takes at the shell, and the function that makes a field's value of it."""

    kind: Any = str
    metavar: str | None = None
    read: Callable[[Any, str], Any] = lambda value, _: value
    names: tuple[str, ...] = ()
    default: Any = None
    least: int | None = None
    most: int | None = None
    """The bounds of a number, or of the items of a list."""
    complete: Callable[..., list[str]] | None = None
    check: Callable[[Any], Any] | None = None


class FieldOption(NamedTuple):
    """The option of one field."""

    parameter: inspect.Parameter
    form: Form
    path: tuple[str, ...]
    """The field, or a field and its part."""


_SPREAD: Final = frozenset({"select", "shape", "config"})
"""Fields whose parts have an option each."""
_WITHOUT: Final = frozenset({"encoding", "return_differences"})
"""Fields that the command chooses by itself."""
_SINGULAR: Final = {"queries": "row"}
"""Options of lists that are not the field's name without its s."""
_COMPLETE: Final = {
    "kernel": completion.kernels, "module": completion.modules, "spec": completion.specs,
    "wrt": completion.differentiable,
}  # fmt: skip


def options_of(
    model: type[BaseModel], *, only: Collection[str] = (), without: Collection[str] = (),
    positional: Collection[str] = (), forms: Mapping[str, Form] | None = None, panel: str | None = None,
    within: tuple[str, ...] = (), checked: bool = False,
) -> dict[str, FieldOption]:  # fmt: skip
    """Return the options of a model's fields, by field. ``forms``: those that the fields' types do not tell.

    ``checked``: the options check the bounds of numbers and the choices of names, since no request does.
    """
    found: dict[str, FieldOption] = {}
    for name, field in model.model_fields.items():
        if name in _WITHOUT or name in without or (only and name not in only):
            continue
        if name in _SPREAD:
            found |= options_of(members_of(field.annotation)[0], forms=forms, within=(name,))
            continue
        form = (forms or {}).get(name) or _FORMS.get(name) or _form_of(name, field, checked)
        # A file of the query may hold all inputs, and numbers may be of raw attention alone.
        required = field.is_required() and form.metavar == "FILE" and name != "query"
        told = _argument(field, form) if name in positional else _option(name, field, form, panel)
        annotation: Any = Annotated[form.kind if required else form.kind | None, told]
        found[name] = FieldOption(parameter(name, annotation, ... if required else form.default), form, (*within, name))
    return found


def _argument(field: FieldInfo, form: Form) -> Any:
    return typer.Argument(metavar=form.metavar, autocompletion=form.complete, help=_help(field))


def _option(name: str, field: FieldInfo, form: Form, panel: str | None) -> Any:
    return typer.Option(
        *form.names or [f"--{_dashed(field.alias or name)}"], metavar=form.metavar, min=form.least, max=form.most,
        help=_help(field, get_origin(form.kind) is list),
        autocompletion=form.complete or _COMPLETE.get(name), callback=form.check,
        rich_help_panel=panel or ("Tensors" if form.metavar == "FILE" else None),
    )  # fmt: skip


def parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """Return a parameter of a command; ``...`` for one that must be given."""
    empty = inspect.Parameter.empty
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=empty if default is ... else default
    )


def fields_of(given: Fields, options: Mapping[str, FieldOption]) -> Fields:
    """Take the options out of what was given, and return the request fields that they stand for."""
    fields: Fields = {}
    for name, (_, form, path) in options.items():
        value = given.pop(name, None)
        if value is None or value in (form.default, []):
            continue
        part = fields if len(path) == 1 else fields.setdefault(path[0], {})
        part[path[-1]] = form.read(value, name)
    return fields


def with_signature(command: Callable[..., None], name: str, text: str, parameters: Iterable[inspect.Parameter]) -> None:
    """Give a command of keywords the parameters that the library reads from its signature."""
    every = [*parameters]
    command.__name__, command.__doc__ = name, text
    command.__annotations__ = {each.name: each.annotation for each in every}
    command.__dict__["__signature__"] = inspect.Signature(every)


def takes(
    options: Mapping[str, FieldOption],
    read: Callable[[Fields, Mapping[str, FieldOption]], Fields] = fields_of,
    beside: Sequence[inspect.Parameter] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options to a command, whose first argument is what ``read`` makes of them and the parameters beside them."""

    def extend(command: Callable[..., None]) -> Callable[..., None]:
        def extended(**given: Any) -> None:
            command(read(given, options), **given)

        hints = get_type_hints(command, include_extras=True)
        _, *own = inspect.signature(command).parameters.values()
        named = [each.replace(annotation=hints[each.name], kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
        first = [each for each in named if each.name == "ctx"]
        rest = [each for each in named if each.name != "ctx" and each.name not in {other.name for other in beside}]
        every = [*first, *beside, *rest, *(option.parameter for option in options.values())]
        with_signature(extended, command.__name__, command.__doc__ or "", every)
        return extended

    return extend


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _help(field: FieldInfo, repeated: bool = False) -> str:
    """Return the field's docstring on one line, and its default if the docstring does not tell it."""
    text = escape(" ".join((field.description or "").replace("``", "").split()))
    kind = members_of(field.annotation)[0]
    item = members_of(get_args(kind)[0])[0] if repeated else kind
    choices = [str(each) for each in get_args(item)] if get_origin(item) is Literal else []
    text += " May be repeated." if repeated else ""
    text += f" One of {', '.join(choices)}." if len(choices) > 1 and not all(each in text for each in choices) else ""
    default = field.get_default(call_default_factory=True)
    told = (
        ", ".join(default) if isinstance(default, list) and all(isinstance(item, str) for item in default) else default
    )
    shown = told if isinstance(told, str) or (isinstance(told, (int, float)) and not isinstance(told, bool)) else ""
    return text if shown == "" or "default" in text.lower() else rf"{text}  [dim]\[default: {shown}][/dim]"


def _form_of(name: str, field: FieldInfo, checked: bool) -> Form:
    """Return the form of an option for values of the field's type."""
    kind = members_of(field.annotation)[0]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is list and not _is_model(members_of(arguments[0])[0]):
        return _repeated(name, field, arguments[0])
    if kind is bool:
        option = f"--{_dashed(name)}"
        alone = field.default is False
        return Form(bool, names=(option if alone else f"{option}/--no-{option[2:]}",), default=False if alone else None)
    if origin in {list, dict, np.ndarray} or _is_model(kind):
        return _from_file(kind)
    if not checked:
        return Form(kind if kind in {int, float} else str, "NAME" if origin is Literal else None)
    least, most = (
        next((getattr(each, end) for each in field.metadata if hasattr(each, end)), None) for end in ("ge", "le")
    )
    return Form(kind, least=least, most=most)


def _repeated(name: str, field: FieldInfo, item: Any) -> Form:
    """Return an option in the singular, for one item of a list."""
    number = members_of(item)[0] is int
    option = _SINGULAR.get(name) or (field.alias or name).removesuffix("s")
    told = get_args(item)[1:] if get_origin(item) is Annotated else ()
    bounds = [each for info in told if isinstance(info, FieldInfo) for each in info.metadata]
    least = next((each.ge for each in bounds if hasattr(each, "ge")), None)
    return Form(
        list[int] if number else list[str], None if number else "NAME", names=(f"--{_dashed(option)}",), least=least
    )


def _from_file(kind: Any) -> Form:
    """Return an option for a file of one tensor or of several, or for JSON."""
    if _is_array(kind):
        return Form(metavar="FILE", read=read)
    parts = [each.annotation for each in kind.model_fields.values()] if _is_model(kind) else get_args(kind)[1:]
    if parts and all(map(_is_array, parts)):
        return Form(metavar="FILE", read=read_all)
    return Form(metavar="JSON|FILE", read=read_object if _is_model(kind) else read_json)


def _is_array(annotation: Any) -> bool:
    return get_origin(members_of(annotation)[0]) is np.ndarray


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _taps(names: list[str] | None) -> list[str] | None:
    """Check the names of taps; answer a misspelt one with the nearest."""
    known = get_args(Tap)
    for name in names or ():
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}{hint}")
    return names


def _dropout(text: str, field: str) -> Any:
    try:
        return {"p": float(text)}
    except ValueError:
        return read_object(text, field)


def _labels(text: str, _: str) -> list[str]:
    """Read labels: words, a JSON list, or a file with either."""
    if Path(text).is_file():
        text = Path(text).read_text("utf-8")
    if not text.lstrip().startswith("["):
        return text.split()
    try:
        return [str(label) for label in json.loads(text)]
    except ValueError:  # as in [CLS] the cat
        return text.split()


_FORMS: Final = {
    "return_": Form(list[str], "TAP", names=("--return",), complete=completion.taps, check=_taps),
    "dropout": Form(metavar="P|JSON", read=_dropout),
    "labels": Form(metavar="WORDS|FILE", read=_labels),
    "query_labels": Form(metavar="WORDS|FILE", read=_labels),
    "compare": Form(bool, names=("--differences",), default=False, read=lambda _, __: "unedited"),
}
"""Forms of options that the types of their fields do not tell."""

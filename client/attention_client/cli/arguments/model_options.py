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
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin

import numpy as np
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.markup import escape

from attention_client.cli.arguments import completion
from attention_client.cli.arguments.tensor_arguments import read, read_all, read_json, read_object
from attention_contract.descriptions import described
from attention_contract.schemas.attention import Tap
from attention_contract.validation import members_of

Fields = dict[str, Any]
"""Request fields by name."""


@dataclass(frozen=True)
class OptionForm:
    """The form of an option: what it takes at the shell, and the function that makes a field's value of it."""

    kind: Any = str
    metavar: str | None = None
    read: Callable[[Any, str], Any] = lambda value, _: value
    name: str = ""
    """Its name at the shell; default: the field's."""
    about: str = ""
    """Its help; default: the field's docstring."""
    least: int | None = None
    most: int | None = None
    """The bounds of a number, or of the items of a list."""
    complete: Callable[..., list[str]] | None = None
    check: Callable[[Any], Any] | None = None

    @property
    def unset(self) -> Any:
        """The value of an option that is not given: False for a flag that can only be set."""
        return False if self.kind is bool and "/" not in self.name else None


class FieldOption(NamedTuple):
    """The option of one field."""

    parameter: inspect.Parameter
    form: OptionForm
    path: tuple[str, ...]
    """The field, or a field and its part."""


_SPREAD: Final = frozenset({"select", "shape", "config"})
"""Fields whose parts have an option each."""
_WITHOUT: Final = frozenset({"encoding", "return_differences"})
"""Fields that the command chooses by itself."""
_SINGULAR: Final = {"queries": "row", "keys": "column"}
"""Options of lists that are not the field's name without its s."""
_COMPLETE: Final = {
    "kernel": completion.kernels, "module": completion.modules, "spec": completion.specs,
    "wrt": completion.differentiable,
}  # fmt: skip


def options_of(
    model: type[BaseModel], *, only: Collection[str] = (), without: Collection[str] = (),
    positional: Collection[str] = (), forms: Mapping[str, OptionForm] | None = None, panel: str | None = None,
    within: tuple[str, ...] = (), checked: bool = False,
) -> dict[str, FieldOption]:  # fmt: skip
    """Return the options of a model's fields, by field. ``forms``: those that the fields' types do not tell.

    ``checked``: the options check the bounds of numbers and the choices of names, since no request does.
    """
    options: dict[str, FieldOption] = {}
    for name, field in described(model).items():
        if name in _WITHOUT or name in without or (only and name not in only):
            continue
        if name in _SPREAD:
            options |= options_of(members_of(field.annotation)[0], forms=forms, within=(name,))
            continue
        form = (forms or {}).get(name) or _FORMS.get(name) or _form_of(name, field, checked)
        shared: dict[str, Any] = {"metavar": form.metavar, "min": form.least, "max": form.most}
        shared["help"] = form.about or _help(field)
        shared["autocompletion"] = form.complete or _COMPLETE.get(name)
        declared = typer.Argument(**shared) if name in positional else typer.Option(
            form.name or f"--{_dashed(field.alias or name)}", callback=form.check, **shared,
            rich_help_panel=panel or ("Tensors" if form.metavar == "FILE" else None),
        )  # fmt: skip
        # A file of the query may hold all inputs, and numbers may be of raw attention alone.
        required = field.is_required() and form.metavar == "FILE" and name != "query"
        annotation: Any = Annotated[form.kind if required else form.kind | None, declared]
        options[name] = FieldOption(parameter(name, annotation, ... if required else form.unset), form, (*within, name))
    return options


def parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """Return a parameter of a command; ``...`` for one that must be given."""
    unset = inspect.Parameter.empty if default is ... else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=unset)


def fields_of(given: Fields, options: Mapping[str, FieldOption]) -> Fields:
    """Take the options out of what was given, and return the request fields that they stand for."""
    fields: Fields = {}
    for name, (_, form, path) in options.items():
        value = given.pop(name, None)
        if value is None or value in (form.unset, []):
            continue
        part = fields if len(path) == 1 else fields.setdefault(path[0], {})
        part[path[-1]] = form.read(value, name)
    return fields


def with_signature(command: Callable[..., None], name: str, text: str, parameters: Iterable[inspect.Parameter]) -> None:
    """Give a command of keywords the parameters that the library reads from its signature."""
    every = [*parameters]
    command.__name__, command.__doc__ = name, text
    command.__annotations__ = {declared.name: declared.annotation for declared in every}
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

        _, ctx, *own = inspect.signature(command).parameters.values()
        rest = [declared for declared in own if declared.name not in {other.name for other in beside}]
        every = [ctx, *beside, *rest, *(option.parameter for option in options.values())]
        named = [declared.replace(kind=inspect.Parameter.KEYWORD_ONLY) for declared in every]
        with_signature(extended, command.__name__, command.__doc__ or "", named)
        return extended

    return extend


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _help(field: FieldInfo) -> str:
    """Return the field's docstring on one line, with the choices and the default that it does not tell."""
    text = escape(" ".join((field.description or "").replace("``", "").split()))
    kind = members_of(field.annotation)[0]
    default = field.get_default(call_default_factory=True)
    if get_origin(kind) is list:
        kind = members_of(get_args(kind)[0])[0]
        default = ", ".join(default) if isinstance(default, list) and default and isinstance(default[0], str) else None
        text += "" if _is_model(kind) else " May be repeated."
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    if len(choices) > 1 and not all(choice in text for choice in choices):
        text += f" One of {', '.join(choices)}."
    complete = "default" in text.lower() or isinstance(default, bool) or not isinstance(default, str | int | float)
    return text if complete or default == "" else rf"{text}  [dim]\[default: {default}][/dim]"


def _form_of(name: str, field: FieldInfo, checked: bool) -> OptionForm:
    """Return the form of an option for values of the field's type."""
    kind = members_of(field.annotation)[0]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is list and not _is_model(item := members_of(arguments[0])[0]):
        option = f"--{_dashed(_SINGULAR.get(name) or (field.alias or name).removesuffix('s'))}"
        least, _ = _bounds(get_args(arguments[0])[1:])
        return (
            OptionForm(list[int], name=option, least=least)
            if item is int
            else OptionForm(list[str], "NAME", name=option)
        )
    if origin in {list, dict, np.ndarray} or _is_model(kind):
        return _from_file(kind)
    if kind is bool and field.default is not False:
        return OptionForm(bool, name=f"--{_dashed(name)}/--no-{_dashed(name)}")
    if kind is bool:
        return OptionForm(bool, name=f"--{_dashed(name)}")
    if checked:
        return OptionForm(kind, least=_bounds([field])[0], most=_bounds([field])[1])
    return OptionForm(kind if kind in {int, float} else str, "NAME" if origin is Literal else None)


def _bounds(fields: Sequence[Any]) -> tuple[int | None, int | None]:
    """Return the smallest and the largest number that fields allow."""
    limits = [constraint for field in fields if isinstance(field, FieldInfo) for constraint in field.metadata]
    least, most = (
        next((getattr(constraint, end) for constraint in limits if hasattr(constraint, end)), None)
        for end in ("ge", "le")
    )
    return least, most


def _from_file(kind: Any) -> OptionForm:
    """Return an option for a file of one tensor or of several, or for JSON."""
    if _is_array(kind):
        return OptionForm(metavar="FILE", read=read)
    parts = [field.annotation for field in kind.model_fields.values()] if _is_model(kind) else get_args(kind)[1:]
    if parts and all(map(_is_array, parts)):
        return OptionForm(metavar="FILE", read=read_all)
    return OptionForm(metavar="JSON|FILE", read=read_object if _is_model(kind) else read_json)


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
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}{hint}")
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
    "return_": OptionForm(list[str], "TAP", name="--return", complete=completion.taps, check=_taps),
    "dropout": OptionForm(metavar="P|JSON", read=_dropout),
    "labels": OptionForm(metavar="WORDS|FILE", read=_labels),
    "query_labels": OptionForm(metavar="WORDS|FILE", read=_labels),
    "compare": OptionForm(
        bool,
        name="--differences",
        read=lambda _, __: "unedited",
        about="Show what the edits change: the results with them minus those without them.",
    ),
}
"""Forms of options that the types of their fields do not tell."""

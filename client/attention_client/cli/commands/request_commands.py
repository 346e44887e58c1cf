"""Commands that send one request and show its reply. Their options are the request's fields."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from string import Formatter
from typing import Annotated, Any, Final

import typer
from pydantic import BaseModel

from attention_client.cli.arguments import completion, tensor_arguments
from attention_client.cli.arguments.model_options import (
    FieldOption,
    Fields,
    OptionForm,
    fields_of,
    options_of,
    parameter,
    with_signature,
)
from attention_client.cli.commands.model_progress import loading_shown
from attention_client.cli.invocation import client_of, send
from attention_client.cli.tables.reply_output import AsJson, Ending, Output, OutputOrRows, Plot, look_options
from attention_client.client import Client
from attention_client.servers.narrowed_looks import asks_too_much, narrow_to_channel
from attention_contract.errors import InvalidRequest
from attention_contract.operations import Operation
from attention_contract.schemas.models import default_model_name

Module = Annotated[str, typer.Argument(autocompletion=completion.modules, help="A resident module.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="Its id on the server.")]
Model = Annotated[str, typer.Argument(autocompletion=completion.models, help="A whole model, such as tiny.")]
_PLACES = {"name": Module, "id": Id, "model": Model}
"""The parts of an operation's path."""
Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", autocompletion=completion.modules, help="A resident module. Left out: raw attention."
    ),
]
_Source = Annotated[
    str | None,
    typer.Argument(metavar="INPUTS", help="The query, or a file of all inputs by name; - is standard input."),
]
_Inputs = Annotated[
    str | None, typer.Option(metavar="FILE", help="One file for all inputs, its tensors named by field.")
]
_Raw = Annotated[bool, typer.Option("--raw", help="Raw attention, as without a NAME.")]
INPUTS: Final = (
    parameter("name", Name),
    parameter("source", _Source),
    parameter("inputs", _Inputs),
    parameter("raw", _Raw, False),
)
"""The parameters of a command that takes inputs, beside their own options."""


def inputs_of(given: Fields, options: Mapping[str, FieldOption]) -> Fields:
    """Take the inputs and the options out of what was given, and return the request fields that they stand for.

    An option wins over a file of all inputs. What is left has the NAME.
    """
    source, inputs = given.pop("source"), given.pop("inputs")
    if given["name"] == "-":  # no module has this name
        given["name"], source = None, "-"
    fields: Fields = {}
    if source is not None:
        fields |= tensor_arguments.read_inputs(source, "inputs")
    if inputs is not None:
        fields |= tensor_arguments.read_all(inputs, "inputs")
    fields |= fields_of(given, options)
    if given.pop("raw") and given["name"] is not None:
        raise typer.BadParameter("a module's NAME and --raw exclude each other")
    return fields


def check_target(name: str | None, fields: Fields, module: type[BaseModel], raw: type[BaseModel]) -> None:
    """Check that the fields are those of a module with a NAME, and of raw attention without."""
    of_raw = {field: info for field, info in raw.model_fields.items() if field not in module.model_fields}
    option = {field: f"--{field.replace('_', '-')}" for field in of_raw}
    wrong = [option[field] for field in of_raw if field in fields]
    if name is not None and wrong:
        raise typer.BadParameter("it applies only to raw attention; omit it or NAME", param_hint=wrong[0])
    missing = [option[field] for field, info in of_raw.items() if info.is_required() and field not in fields]
    if name is None and missing:
        raise typer.BadParameter(f"expected a module's NAME, or {' and '.join(missing)}", param_hint="NAME")


def _named(load: Fields) -> str:
    """Return the name that a checkpoint is loaded under."""
    return str(load.get("name") or default_model_name(load["checkpoint"]))


@dataclass(frozen=True)
class RequestCommand:
    """A command that sends one request and shows its reply."""

    call: str
    """The client's method, by its dotted name."""
    operation: Operation[Any]
    raw: Operation[Any] | None = None
    """The operation of the client's ``attention``, for a command without a NAME."""
    positional: tuple[str, ...] = ()
    """Fields that are no options."""
    chief: str | None = None
    """The tensor of the reply that a file of one tensor holds; "" if there is none, None if no file is written."""
    forms: Mapping[str, OptionForm] = field(default_factory=dict)
    prepare: Callable[[str | None, Fields, Ending], None] = lambda name, fields, ending: None
    """Completes the fields of a request for NAME."""
    narrows: bool = False
    """Look at one channel of one layer where a request about all layers is refused, and say so."""
    help: str = ""
    """The text of ``--help``; default: the summary of the operation."""

    @property
    def summary(self) -> str:
        """The text of ``--help``."""
        return self.help or f"{self.operation.summary}."

    def command(self) -> Callable[..., None]:
        """Return the function that the library calls with the values of the options."""
        of_module = self.operation.request or BaseModel
        model = of_module if self.raw is None else self.raw.request or BaseModel
        place = next((name for _, name, _, _ in Formatter().parse(self.operation.path) if name), None)
        options = options_of(model, positional=self.positional, forms=self.forms)

        def run(ctx: typer.Context, **given: Any) -> None:
            ending = Ending.taken(given)
            fields = inputs_of(given, options) if "source" in given else fields_of(given, options)
            name = given.get(place or "")
            if self.raw is not None:
                check_target(name, fields, of_module, model)
            if "query" in options and fields.get("query") is None:
                detail = "expected a file; or INPUTS or --inputs that holds a query"
                raise typer.BadParameter(detail, param_hint="--query")
            stated = dict(fields)
            self.prepare(name, fields, ending)
            if self.operation.reply is None:
                with client_of(ctx) as client:
                    send(client, self.call, name, fields)
                typer.echo(f"deleted {name}")
                return
            loaded = name if place == "model" else _named(fields) if self.call == "models.load" else None

            def answer(client: Client) -> Any:
                with nullcontext() if loaded is None else loading_shown(client, loaded):
                    return send(client, self.call, name, fields)

            try:
                ending.answer(ctx, answer, self.chief)
            except InvalidRequest as refused:
                if not self.narrows or name is None or not asks_too_much(refused, fields):
                    raise
                fields = stated
                with client_of(ctx) as client:
                    typer.echo(narrow_to_channel(client, name, fields), err=True)
                self.prepare(name, fields, ending)
                ending.answer(ctx, answer, self.chief)

        with_signature(
            run,
            self.call.rpartition(".")[2],
            self.summary,
            self._parameters(place, options),
        )
        return run

    def _parameters(self, place: str | None, options: Mapping[str, FieldOption]) -> list[inspect.Parameter]:
        """Return the parameters of the command: NAME or ID, the fields, and those of its end."""
        first: tuple[inspect.Parameter, ...] = INPUTS if "query" in options else ()
        if place is not None and not first:
            first = (parameter(place, Name) if self.raw else parameter(place, _PLACES[place], ...),)
        ends = [] if self.operation.reply is None else [parameter("as_json", AsJson, False)]
        ends += [] if self.chief is None else [parameter("output", OutputOrRows if self.operation.tables else Output)]
        if self.operation.pictures:
            ends += [parameter("plot", Plot), *(option.parameter for option in look_options().values())]
        return [parameter("ctx", typer.Context, ...), *first, *(option.parameter for option in options.values()), *ends]

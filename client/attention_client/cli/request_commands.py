"""Commands that send one request and show its reply. Their options are the request's fields."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from attention_client.cli import completion
from attention_client.cli.inputs import INPUTS, Name, check_target, inputs_of
from attention_client.cli.invocation import send
from attention_client.cli.model_options import Fields, Form, fields_of, options_of, parameter, with_signature
from attention_client.cli.reply_output import LOOK, AsJson, Ending, Output, Plot
from attention_contract.operations import Operation

Module = Annotated[str, typer.Argument(autocompletion=completion.modules, help="A resident module.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="Its id on the server.")]
_PLACES = {"name": Module, "id": Id}
"""The parts of an operation's path."""


@dataclass(frozen=True)
class RequestCommand:
    """A command that sends one request and shows its reply."""

    call: str
    """The client's method, by its dotted name."""
    operation: Operation[Any]
    help: str
    raw: Operation[Any] | None = None
    """The operation of the client's ``attention``, for a command without a NAME."""
    positional: tuple[str, ...] = ()
    """Fields that are no options."""
    chief: str | None = None
    """The tensor of the reply that a file of one tensor holds; "" if there is none, None if no file is written."""
    forms: Mapping[str, Form] = field(default_factory=dict)
    prepare: Callable[[str | None, Fields, Ending], None] = lambda name, fields, ending: None
    """Completes the fields of a request for NAME."""

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
                told = "expected a file; or INPUTS or --inputs that holds a query"
                raise typer.BadParameter(told, param_hint="--query")
            self.prepare(name, fields, ending)
            ending.answer(ctx, lambda client: send(client, self.call, name, fields), self.chief)

        parameters = [parameter("ctx", typer.Context, ...)]
        if "query" in options:
            parameters += INPUTS
        elif place is not None:
            parameters.append(parameter(place, Name) if self.raw else parameter(place, _PLACES[place], ...))
        parameters += [option.parameter for option in options.values()]
        parameters.append(parameter("as_json", AsJson, False))
        if self.chief is not None:
            parameters.append(parameter("output", Output))
        if self.operation.pictures:
            parameters += [parameter("plot", Plot), *(option.parameter for option in LOOK.values())]
        with_signature(run, self.call.rpartition(".")[2], self.help, parameters)
        return run


def group(text: str, listed: RequestCommand) -> typer.Typer:
    """Return a group of commands that lists by itself."""
    app = typer.Typer(help=text, rich_markup_mode="rich")
    command = listed.command()
    app.command("list")(command)

    @app.callback(invoke_without_command=True, help=text)
    def listing(ctx: typer.Context, as_json: AsJson = False) -> None:
        if ctx.invoked_subcommand is None:
            command(ctx=ctx, as_json=as_json)
        elif as_json:
            where = f"it belongs behind the command, as in attention {ctx.info_name} list --json"
            raise typer.BadParameter(where, param_hint="--json")

    return app

"""``attention modules``, ``attention checkpoints`` and ``attention import``."""

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from attention_client.cli.arguments import completion, tensor_arguments
from attention_client.cli.arguments.model_options import Fields, OptionForm, options_of, takes
from attention_client.cli.commands.command_table import group
from attention_client.cli.commands.model_commands import fetch_shown
from attention_client.cli.commands.request_commands import Module
from attention_client.cli.extensions import run_extension
from attention_client.cli.invocation import client_of
from attention_client.cli.tables.reply_output import AsJson, present
from attention_client.client import Client
from attention_contract.errors import CheckpointNotFound, Forbidden
from attention_contract.schemas.modules import (
    CreateModule,
    ImportModule,
    ModuleInfo,
    ModuleList,
    ParameterList,
    ParameterQuery,
    Stack,
)

_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
app = group("modules")


@app.command()
@takes(options_of(CreateModule, without={"name"}))
def create(
    fields: Fields,
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the module.")],
    config: Annotated[
        str | None, typer.Option(metavar="JSON|FILE", help="All fields of the config as JSON; options override them.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a module from a seed or from its parameters."""
    whole = {} if config is None else tensor_arguments.read_object(config, "config")
    whole |= fields.pop("config", {})
    with client_of(ctx) as client:
        reply = client.modules.create(name, whole, **fields)
    present(reply, as_json)


@app.command()
def delete(
    ctx: typer.Context,
    name: Module,
    version: Annotated[str | None, typer.Option(help="Only if it is still at this version.")] = None,
) -> None:
    """Remove a module from the device and the store."""
    with client_of(ctx) as client:
        client.modules.delete(name, version)


@app.command()
@takes(options_of(ParameterQuery))
def parameters(
    fields: Fields,
    ctx: typer.Context,
    name: Module,
    parameter: Annotated[
        str | None, typer.Argument(autocompletion=completion.parameters, help="One of them, as in q_proj.weight.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", callback=tensor_arguments.writable, help="Write it, or all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show names, shapes and statistics of a module's parameters; or one parameter."""
    if parameter is None and fields:
        raise typer.BadParameter("--head, --slice and --version need a PARAMETER")
    with client_of(ctx) as client:
        if parameter is None:
            listed = client.modules.parameters(name)
            if output is not None:
                tensor_arguments.write(output, _every_parameter(client, listed))
            else:
                present(listed, as_json)
            return
        reply = client.modules.parameter(name, parameter, **fields)
    if output is not None:
        tensor_arguments.write(output, reply, "value")
    if as_json or output is None:
        present(reply, as_json)


def _every_parameter(client: Client, listed: ParameterList) -> dict[str, NDArray[Any]]:
    """Return every parameter of a module by name, all of the version that was listed."""
    names = [one.name for one in listed.parameters]
    return {one: client.modules.parameter(listed.name, one, version=listed.version).value for one in names}


def checkpoints(
    ctx: typer.Context,
    path: Annotated[
        str | None,
        typer.Argument(autocompletion=completion.checkpoints, help="The checkpoint whose attention layers are shown."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the checkpoints of the server's model repository, or the attention layers of one; nothing is loaded."""
    with client_of(ctx) as client:
        present(client.checkpoints.list() if path is None else client.checkpoints.get(path), as_json)


@takes(
    options_of(
        ImportModule,
        without={"checkpoint"},
        forms={
            "layer": OptionForm(int, complete=completion.layers),
            "part": OptionForm(Literal["self", "cross"], "NAME"),
            "stack": OptionForm(Stack, "NAME"),
        },
    )
)
def import_module(
    fields: Fields,
    ctx: typer.Context,
    checkpoint: Annotated[
        str,
        typer.Argument(
            autocompletion=completion.checkpoints,
            help="Path inside the server's model repository, or tiny, which ships with the server.",
        ),
    ],
    every_layer: Annotated[bool, typer.Option("--all", help="Every layer, or none if one fails.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a module from one attention layer of a checkpoint, or from each of them.

    A CHECKPOINT such as openai-community/gpt2 that the model repository lacks is fetched from the Hugging Face hub: by
    the server if its operator allows it, else by this machine into the model repository of ATTENTION_MODELS_DIR.
    """
    with client_of(ctx) as client:
        _fetch_if_missing(client, checkpoint)
        if every_layer and fields.keys() & {"layer", "name", "part", "stack"}:
            raise typer.BadParameter("--layer, --name, --part and --stack choose one layer", param_hint="--all")
        if every_layer:
            reply: ModuleInfo | ModuleList = _import_all(client, checkpoint, fields)
        else:
            reply = client.modules.import_(checkpoint, **fields)
    present(reply, as_json)


def _import_all(client: Client, checkpoint: str, fields: Fields) -> ModuleList:
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(f"importing {checkpoint}", total=None)

        def show(module: ModuleInfo, number: int, total: int) -> None:
            progress.update(task, description=f"imported {module.name}", completed=number, total=total)

        made = client.modules.import_all(checkpoint, on_imported=show, **fields)
    return ModuleList(modules=[*made], bytes=sum(module.bytes for module in made))


def _fetch_if_missing(client: Client, checkpoint: str) -> None:
    """Fetch a repository of the hub that the model repository lacks; leave every other name to the import."""
    if _REPOSITORY.fullmatch(checkpoint) is None:
        return
    try:
        if client.checkpoints.get(checkpoint).fetch is None:
            return
    except CheckpointNotFound:
        pass
    try:
        fetch_shown(client, checkpoint)
    except Forbidden:
        run_extension("fetch", [checkpoint])

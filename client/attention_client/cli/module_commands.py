"""``attention modules`` and ``attention import``."""

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from attention_client import Client
from attention_client.cli import completion, display, tensor_arguments
from attention_client.cli.extensions import run_extension
from attention_client.cli.invocation import AsJson, client_of, present, print_json
from attention_contract.errors import CheckpointNotFound, Forbidden
from attention_contract.schemas.modules import ModuleInfo, ModuleList, ParameterList, Stack

_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
app = typer.Typer(help="List, make, describe, change and remove resident modules.", rich_markup_mode="rich")
Name = Annotated[str, typer.Argument(autocompletion=completion.modules, help="A resident module.")]
Durable = Annotated[
    bool, typer.Option(help="Keep it in the server's store, or in its memory alone, where a restart loses it.")
]


@app.callback(invoke_without_command=True)
def modules(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List, make, describe, change and remove resident modules."""
    if ctx.invoked_subcommand is None:
        every(ctx, as_json)
    elif as_json:
        raise typer.BadParameter(
            "it belongs behind the command, as in attention modules list --json", param_hint="--json"
        )


@app.command("list")
def every(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List every resident module."""
    with client_of(ctx) as client:
        reply = client.modules.list()
    present(reply, as_json, display.modules)


@app.command("show")
def one(ctx: typer.Context, name: Name, as_json: AsJson = False) -> None:
    """Show config, version, device and bytes of one module."""
    with client_of(ctx) as client:
        reply = client.modules.get(name)
    present(reply, as_json, display.facts)


@app.command()
def create(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the module.")],
    d_model: Annotated[int | None, typer.Option(help="Width of the query and of the output.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="Key/value heads; default: as many.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of a head; default: d_model / heads.")] = None,
    value_dim: Annotated[int | None, typer.Option(help="Width of a head's values.")] = None,
    key_width: Annotated[int | None, typer.Option(help="Input width of the keys; default: d_model.")] = None,
    value_width: Annotated[int | None, typer.Option(help="Input width of the values; default: d_model.")] = None,
    bias: Annotated[
        bool | None, typer.Option(help="Biases on all projections, or on none; one of each projection: --config.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or float64.")] = None,
    spec: Annotated[str | None, typer.Option(metavar="JSON|FILE", help="The attention spec.")] = None,
    config: Annotated[str | None, typer.Option(metavar="JSON|FILE", help="All of the above at once.")] = None,
    seed: Annotated[int | None, typer.Option(help="Draw the parameters from this seed; default: 0.")] = None,
    parameters: Annotated[str | None, typer.Option(metavar="FILE", help="Every parameter: .safetensors, .npz.")] = None,
    durable: Durable = True,
    as_json: AsJson = False,
) -> None:
    """Make a module from a seed or from its parameters."""
    given: dict[str, Any] = {"d_model": d_model, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    given |= {"head_dim": head_dim, "value_dim": value_dim, "key_width": key_width, "value_width": value_width}
    given |= {"bias": bias, "dtype": dtype, "spec": None if spec is None else tensor_arguments.read_json(spec, "spec")}
    whole: dict[str, Any] = {} if config is None else tensor_arguments.read_object(config, "config")
    whole |= {option: value for option, value in given.items() if value is not None}
    tensors = None if parameters is None else tensor_arguments.read_all(parameters, "parameters")
    with client_of(ctx) as client:
        reply = client.modules.create(name, whole, seed=seed, parameters=tensors, durable=durable)
    present(reply, as_json, display.facts)


@app.command()
def replace(
    ctx: typer.Context,
    name: Name,
    parameters: Annotated[str, typer.Option(metavar="FILE", help="Every parameter: .safetensors, .npz.")],
    version: Annotated[str | None, typer.Option(help="Only if it is still at this version.")] = None,
    as_json: AsJson = False,
) -> None:
    """Replace all parameters of a module, or none."""
    tensors = tensor_arguments.read_all(parameters, "parameters")
    with client_of(ctx) as client:
        reply = client.modules.replace_parameters(name, tensors, version=version)
    present(reply, as_json, display.facts)


@app.command()
def delete(
    ctx: typer.Context,
    name: Name,
    version: Annotated[str | None, typer.Option(help="Only if it is still at this version.")] = None,
) -> None:
    """Remove a module from the device and the store."""
    with client_of(ctx) as client:
        client.modules.delete(name, version)


@app.command()
def parameters(
    ctx: typer.Context,
    name: Name,
    parameter: Annotated[
        str | None, typer.Argument(autocompletion=completion.parameters, help="One of them, as in q_proj.weight.")
    ] = None,
    head: Annotated[int | None, typer.Option(help="Only this head's part.")] = None,
    part: Annotated[str | None, typer.Option("--slice", help="Then this slice, as in 0:4,:8.")] = None,
    version: Annotated[str | None, typer.Option(help="Answer only if the module is at this version.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", callback=tensor_arguments.writable, help="Write it, or all."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show names, shapes and statistics of a module's parameters; or one parameter."""
    if parameter is None and (head is not None or part is not None or version is not None):
        raise typer.BadParameter("--head, --slice and --version need a PARAMETER")
    with client_of(ctx) as client:
        if parameter is None:
            listed = client.modules.parameters(name)
            if output is not None:
                tensor_arguments.write_named(output, _every_parameter(client, listed))
                return
            print_json(listed) if as_json else display.parameters(listed)
            return
        reply = client.modules.parameter(name, parameter, head=head, slice=part, version=version)
    if output is not None:
        tensor_arguments.write(output, reply, "value")
    if as_json:
        print_json(reply)
    elif output is None:
        display.values(reply.value)


def _every_parameter(client: Client, listed: ParameterList) -> dict[str, NDArray[Any]]:
    """Return every parameter of a module by name, all of the version that was listed."""
    names = [one.name for one in listed.parameters]
    return {one: client.modules.parameter(listed.name, one, version=listed.version).value for one in names}


def import_module(
    ctx: typer.Context,
    checkpoint: Annotated[
        str, typer.Argument(autocompletion=completion.checkpoints, help="Path inside the server's model repository.")
    ],
    layer: Annotated[int, typer.Option(autocompletion=completion.layers, help="Which attention layer, from 0.")] = 0,
    name: Annotated[str | None, typer.Option(help="Name of the module; default: folder.layer.")] = None,
    part: Annotated[Literal["self", "cross"], typer.Option(help="Self- or cross-attention.")] = "self",
    stack: Annotated[Stack | None, typer.Option(help="Needed if a checkpoint has several.")] = None,
    spec: Annotated[
        str | None,
        typer.Option(metavar="JSON|FILE", help="Fields of the spec that replace the checkpoint's, or that it lacks."),
    ] = None,
    num_heads: Annotated[int | None, typer.Option(help="Needed if the checkpoint does not tell.")] = None,
    every_layer: Annotated[bool, typer.Option("--all", help="Every layer, or none if one fails.")] = False,
    durable: Durable = True,
    as_json: AsJson = False,
) -> None:
    """Make a module from one attention layer of a checkpoint, or from each of them.

    A CHECKPOINT such as openai-community/gpt2 that the model repository lacks is fetched from the Hugging Face hub: by
    the server if its operator allows it, else by this machine into the model repository of ATTENTION_MODELS_DIR.
    """
    told: dict[str, Any] = {
        "num_heads": num_heads,
        "durable": durable,
        "spec": None if spec is None else tensor_arguments.read_object(spec, "spec"),
    }
    with client_of(ctx) as client:
        _fetch_if_missing(client, checkpoint)
        if every_layer:
            if (layer, name, part, stack) != (0, None, "self", None):
                raise typer.BadParameter("--layer, --name, --part and --stack choose one layer", param_hint="--all")
            _import_all(client, checkpoint, as_json, **told)
            return
        reply = client.modules.import_(checkpoint, layer=layer, name=name, part=part, stack=stack, **told)
    present(reply, as_json, display.facts)


def _import_all(client: Client, checkpoint: str, as_json: bool, **told: Any) -> None:
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(f"importing {checkpoint}", total=None)

        def show(module: ModuleInfo, number: int, total: int) -> None:
            progress.update(task, description=f"imported {module.name}", completed=number, total=total)

        made = client.modules.import_all(checkpoint, on_imported=show, **told)
    listed = ModuleList(modules=[*made], bytes=sum(module.bytes for module in made))
    present(listed, as_json, display.modules)


def _fetch_if_missing(client: Client, checkpoint: str) -> None:
    """Fetch a repository of the hub that the model repository lacks; leave every other name to the import."""
    if _REPOSITORY.fullmatch(checkpoint) is None:
        return
    try:
        client.checkpoints.get(checkpoint)
    except CheckpointNotFound:
        typer.echo(f"fetching {checkpoint} from the hub", err=True)
        try:
            client.checkpoints.fetch(checkpoint)
        except Forbidden:
            run_extension("fetch", [checkpoint])

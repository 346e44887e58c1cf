"""``attention record``, ``attention show`` and ``attention recordings``."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from attention_client.cli import display, recording_tables
from attention_client.cli.answering import answer
from attention_client.cli.invocation import AsJson, Target, Text, client_of, present
from attention_client.cli.layer_commands import Combine, Discard, Residual, Traced
from attention_client.cli.plot_options import PlotFile, takes_plot
from attention_client.recording import Recording
from attention_client.recording import record as record_text
from attention_client.recording.checkpoint_model import load_model, path_in_repository
from attention_client.recording.recorder import check_taps
from attention_contract.wire import PICTURES, to_json

app = typer.Typer(help="List, store, fetch and remove recordings of a server.", rich_markup_mode="rich")
Id = Annotated[str, typer.Argument(metavar="ID", help="A stored recording.")]
ENDING = ".safetensors"


def _writable(path: Path | None) -> Path | None:
    """Check the path to write a recording to before anything runs. An option's callback."""
    if path is not None and path.suffix != ENDING:
        raise typer.BadParameter(f"expected a file that ends in {ENDING}; got {path}")
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.absolute().parent}")
    return path


Output = Annotated[
    Path | None, typer.Option("--output", "-o", callback=_writable, help="Write the recording: .safetensors.")
]


def _drawable(path: Path | None) -> Path | None:
    """Check the path to draw to before anything runs. An option's callback."""
    endings = [f".{ending}" for ending in PICTURES.values()]
    if path is not None and path.suffix not in endings:
        raise typer.BadParameter(f"expected a file that ends in {' or '.join(endings)}; got {path}")
    return path


def record(
    ctx: typer.Context,
    checkpoint: Annotated[str, typer.Argument(help="A folder of transformers, here or inside the model repository.")],
    text: Text,
    target: Target = None,
    taps: Annotated[
        list[str] | None,
        typer.Option("--taps", metavar="TAP", help="A tap to record; may be repeated. Default: weights."),
    ] = None,
    output: Output = None,
    post: Annotated[bool, typer.Option("--post", help="Store the recording on the server.")] = False,
    local: Annotated[bool, typer.Option("--local", help="Run the attention here, without a server.")] = False,
    models_dir: Annotated[
        Path | None, typer.Option(envvar="ATTENTION_MODELS_DIR", help="The model repository, if it is on this machine.")
    ] = None,
) -> None:
    """Record a text's way through a model whose attention runs on the server.

    The server imports the attention of every layer into modules, and removes those that it made. If it cannot, it
    attends with the q, k and v of the model. The checkpoint's other parts run here, by transformers. Without
    --output and --post, the recording is written to recording.safetensors.
    """
    chosen = taps or ["weights"]
    check_taps(chosen, remote=not local)
    try:
        model, tokenizer = load_model(checkpoint, models_dir)
    except ImportError as fault:
        typer.echo(f"attention record needs {fault.name}: pip install 'attention-service[transformers]'", err=True)
        raise typer.Exit(1) from None
    if local:
        recording = record_text(model, tokenizer, text, taps=chosen, target=target)  # type: ignore[arg-type]
    else:
        with client_of(ctx) as client:
            place = path_in_repository(checkpoint, models_dir)
            recording = record_text(
                model,
                tokenizer,
                text,
                taps=chosen,  # type: ignore[arg-type]
                target=target,
                client=client,
                checkpoint=place,
            )
    if output is not None or not post:
        path = recording.save(output or Path(f"recording{ENDING}"))
        typer.echo(f"written to {path}")
    if post:
        with client_of(ctx) as client:
            typer.echo(f"stored as {client.recordings.create(recording).id}")
    recording_tables.facts(recording)
    recording_tables.heads(recording, None, None)


def show(
    ctx: typer.Context,
    file: Annotated[str, typer.Argument(help="A file of a recording, or the id of a stored one.")],
    layer: Annotated[
        str | None, typer.Option(help="Each token's top keys in this layer, such as 0 or decoder.0.")
    ] = None,
    head: Annotated[int | None, typer.Option(min=0, help="Only this head.")] = None,
    query: Annotated[int | None, typer.Option(min=0, help="Only this query: the number of its token.")] = None,
    top_k: Annotated[int, typer.Option(min=1, help="Keys to name for each token.")] = 3,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=_drawable, help="Draw the heat maps of the layer into a .svg or .png."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a recording: the entropy of every head, or each token's most attended keys in a layer."""
    recording = _opened(ctx, file)
    if as_json:
        typer.echo(to_json(recording.facts))
        return
    recording_tables.facts(recording)
    if layer is None and query is None:
        recording_tables.heads(recording, layer, head)
    else:
        recording_tables.top_keys(recording, layer, head, query, top_k)
    if picture is not None:
        _draw(recording, picture, layer, head)


def _opened(ctx: typer.Context, file: str) -> Recording:
    if Path(file).is_file():
        return Recording.load(file)
    if len(file) == 32 and not Path(file).suffix:
        with client_of(ctx) as client:
            return client.recordings.download(file)
    raise typer.BadParameter(f"there is no file {file}", param_hint="FILE")


def _draw(recording: Recording, picture: Path, layer: str | None, head: int | None) -> None:
    shown = layer or next((each.name for each in recording.attentions), "0")
    try:
        figure = recording.figure(shown, head)
    except ModuleNotFoundError as fault:
        typer.echo(f"--picture needs {fault.name}: pip install 'attention-service[plot]'", err=True)
        raise typer.Exit(1) from None
    figure.savefig(picture)
    typer.echo(f"drawn into {picture}")


@app.callback(invoke_without_command=True)
def recordings(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List, store, fetch and remove recordings of a server."""
    if ctx.invoked_subcommand is None:
        every(ctx, as_json)


@app.command("list")
def every(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List every stored recording, the newest first."""
    with client_of(ctx) as client:
        reply = client.recordings.list()
    present(reply, as_json, recording_tables.stored)


@app.command()
def create(
    ctx: typer.Context, file: Annotated[Path, typer.Argument(help="A file of a recording.")], as_json: AsJson = False
) -> None:
    """Store the file of a recording."""
    if not file.is_file():
        raise typer.BadParameter(f"there is no file {file}", param_hint="FILE")
    with client_of(ctx) as client:
        reply = client.recordings.create(Recording.load(file))
    present(reply, as_json, lambda info: typer.echo(f"stored as {info.id}"))


@app.command("get")
def one(ctx: typer.Context, id: Id, output: Output = None, as_json: AsJson = False) -> None:  # noqa: A002
    """Describe a stored recording, and write its file with --output."""
    with client_of(ctx) as client:
        reply = client.recordings.get(id)
        if output is not None:
            client.recordings.download(id).save(output)
    present(reply, as_json, display.facts)


@app.command()
@takes_plot
def statistics(
    ctx: typer.Context,
    id: Id,  # noqa: A002
    names: Annotated[
        list[str] | None, typer.Option("--statistic", metavar="NAME", help="A statistic to show; may be repeated.")
    ] = None,
    layers: Annotated[
        list[str] | None, typer.Option("--layer", metavar="NAME", help="Only this layer; may be repeated.")
    ] = None,
    plot_file: PlotFile | None = None,
    as_json: AsJson = False,
) -> None:
    """Show statistics of the weights of a stored recording, by layer and head."""
    fields: dict[str, Any] = {"statistics": names or None, "layers": layers or None}
    show = recording_tables.statistics
    answer(ctx, lambda client: client.recordings.statistics(id, **fields), show, as_json=as_json, plot_file=plot_file)


@app.command()
@takes_plot
def similarity(
    ctx: typer.Context,
    id: Id,  # noqa: A002
    tensor: Annotated[
        str, typer.Option(help="weights, by divergence; q, k, v, context, output or hidden, by CKA.")
    ] = "weights",
    layers: Annotated[
        list[str] | None, typer.Option("--layer", metavar="NAME", help="Only this layer; may be repeated.")
    ] = None,
    other: Annotated[
        str | None, typer.Option("--with", help="Compare with the recording of this id, of the same tokens.")
    ] = None,
    with_layers: Annotated[
        list[str] | None,
        typer.Option("--with-layer", metavar="NAME", help="Only this layer of the other; may be repeated."),
    ] = None,
    plot_file: PlotFile | None = None,
    as_json: AsJson = False,
) -> None:
    """Show the most similar heads or layers of each, of one stored recording or of two."""
    fields: dict[str, Any] = {"tensor": tensor, "layers": layers or None, "with_": other}
    fields["with_layers"] = with_layers or None
    show = recording_tables.similarity
    answer(ctx, lambda client: client.recordings.similarity(id, **fields), show, as_json=as_json, plot_file=plot_file)


@app.command()
@takes_plot
def rollout(
    ctx: typer.Context,
    id: Id,  # noqa: A002
    method: Annotated[str, typer.Option(metavar="NAME", help="rollout or flow.")] = "rollout",
    combine: Combine = "mean",
    residual: Residual = 0.5,
    discard: Discard = 0.0,
    layers: Annotated[
        list[str] | None, typer.Option("--layer", metavar="NAME", help="Only this layer; may be repeated.")
    ] = None,
    queries: Traced = None,
    plot_file: PlotFile | None = None,
    as_json: AsJson = False,
) -> None:
    """Show which inputs the state of each token comes from, over the layers of a stored recording."""
    fields: dict[str, Any] = {"method": method, "combine": combine, "residual": residual, "discard": discard}
    fields |= {"layers": layers or None, "queries": queries or None}
    show = partial(recording_tables.rollout, queries=queries)
    answer(ctx, lambda client: client.recordings.rollout(id, **fields), show, as_json=as_json, plot_file=plot_file)


@app.command()
def delete(ctx: typer.Context, id: Id) -> None:  # noqa: A002
    """Remove a stored recording."""
    with client_of(ctx) as client:
        client.recordings.delete(id)
    typer.echo(f"deleted {id}")

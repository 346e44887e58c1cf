"""``attention record``, ``attention show`` and ``attention recordings``."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from attention_client.cli.arguments import completion
from attention_client.cli.arguments.tensor_arguments import ending_in
from attention_client.cli.commands.command_table import group
from attention_client.cli.commands.model_progress import loading_shown
from attention_client.cli.commands.request_commands import Id
from attention_client.cli.invocation import client_of
from attention_client.cli.tables import recording_tables
from attention_client.cli.tables.reply_output import AsJson, drawable, present
from attention_client.client import Client
from attention_client.errors import UnexpectedReply
from attention_client.recording import Recording
from attention_client.recording import record as record_text
from attention_client.recording.checkpoint_model import is_folder, load_model, path_in_repository
from attention_client.recording.recorder import check_taps
from attention_contract.errors import InvalidRequest, ModelNotFound
from attention_contract.wire import to_json

app = group("recordings")
Checkpoint = Annotated[
    str,
    typer.Argument(
        autocompletion=completion.models,
        help="A whole model of the server, such as tiny; or a folder of transformers, here or in the model repository.",
    ),
]
Text = Annotated[str, typer.Argument(help="The text to read.")]
Target = Annotated[
    str | None,
    typer.Option(help="The decoder's text, of a model with an encoder too."),
]
ModelsDir = Annotated[
    Path | None, typer.Option(envvar="ATTENTION_MODELS_DIR", help="The model repository, if it is on this machine.")
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", callback=ending_in(".safetensors"), help="Write the recording: .safetensors."),
]


def record(
    ctx: typer.Context,
    checkpoint: Checkpoint,
    text: Text,
    target: Target = None,
    taps: Annotated[
        list[str] | None,
        typer.Option("--taps", metavar="TAP", help="A tap to record; may be repeated. Default: weights."),
    ] = None,
    output: Output = None,
    post: Annotated[bool, typer.Option("--post", help="Store the recording on the server.")] = False,
    local: Annotated[bool, typer.Option("--local", help="Run the attention here, without a server.")] = False,
    models_dir: ModelsDir = None,
) -> None:
    """Record what a model computes for a text. Its attention runs on the server.

    A whole model of the server runs there. Of a folder, the server imports the attention of every layer into modules,
    and removes those that it made; if it cannot, it attends with the q, k and v of the model. The checkpoint's other
    parts run here, by transformers. Without --output and --post, the recording is written to recording.safetensors.
    """
    chosen = taps or ["weights"]
    check_taps(chosen, remote=not local)
    with nullcontext() if local else client_of(ctx) as client:
        if client is not None and not is_folder(checkpoint, models_dir) and _is_model(client, checkpoint):
            recording = _of_model(client, checkpoint, text, target, chosen)
        else:
            recording = _of_checkpoint(client, checkpoint, text, target, chosen, models_dir)
    if output is not None or not post:
        path = recording.save(output or Path("recording.safetensors"))
        typer.echo(f"written to {path}")
    if post:
        with client_of(ctx) as client:
            typer.echo(f"stored as {client.recordings.create(recording).id}")
    recording_tables.facts(recording)
    recording_tables.overview(recording)


def _is_model(client: Client, name: str) -> bool:
    try:
        client.models.get(name)
    except (ModelNotFound, InvalidRequest):  # a path is no name
        return False
    return True


def _of_model(client: Client, model: str, text: str, target: str | None, taps: list[str]) -> Recording:
    """Record a run of a whole model of the server, which then forgets it."""
    of_pair: Any = {} if target is None else {"target": target}
    returned: Any = taps
    with loading_shown(client, model):
        reply = client.models.forward(model, text, return_=returned, keep=True, top_k=0, **of_pair)
    if reply.recording is None:
        raise UnexpectedReply(f"the server has kept no recording of {model}")
    recording = client.recordings.download(reply.recording)
    client.recordings.delete(reply.recording)
    return recording


def _of_checkpoint(
    client: Client | None, checkpoint: str, text: str, target: str | None, taps: list[str], models_dir: Path | None
) -> Recording:
    """Record a run of a model of transformers here; without a client, its attention runs here too."""
    try:
        model, tokenizer = load_model(checkpoint, models_dir)
    except ImportError as fault:
        typer.echo(f"attention record needs {fault.name}: pip install 'attention-service[transformers]'", err=True)
        raise typer.Exit(1) from None
    place = None if client is None else path_in_repository(checkpoint, models_dir)
    chosen: Any = taps
    return record_text(model, tokenizer, text, taps=chosen, target=target, client=client, checkpoint=place)


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
        typer.Option(metavar="FILE", callback=drawable, help="Draw the heat maps of the layer into a .svg or .png."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a recording: a head as a picture and the entropy of every head, or each token's most attended keys."""
    recording = _opened(ctx, file)
    if as_json:
        typer.echo(to_json(recording.facts))
        return
    recording_tables.facts(recording)
    if layer is None and head is None and query is None:
        recording_tables.overview(recording)
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
    shown = layer or next((attention.name for attention in recording.attentions), "0")
    try:
        figure = recording.figure(shown, head)
    except ModuleNotFoundError as fault:
        typer.echo(f"--picture needs {fault.name}: pip install 'attention-service[plot]'", err=True)
        raise typer.Exit(1) from None
    figure.savefig(picture)
    typer.echo(f"drawn into {picture}")


@app.command()
def create(
    ctx: typer.Context, file: Annotated[Path, typer.Argument(help="A file of a recording.")], as_json: AsJson = False
) -> None:
    """Store the file of a recording."""
    if not file.is_file():
        raise typer.BadParameter(f"there is no file {file}", param_hint="FILE")
    with client_of(ctx) as client:
        reply = client.recordings.create(Recording.load(file))
    present(reply, as_json) if as_json else typer.echo(f"stored as {reply.id}")


@app.command("get")
def one(ctx: typer.Context, id: Id, output: Output = None, as_json: AsJson = False) -> None:  # noqa: A002
    """Describe a stored recording, and write its file with --output."""
    with client_of(ctx) as client:
        reply = client.recordings.get(id)
        if output is not None:
            client.recordings.download(id).save(output)
    present(reply, as_json)

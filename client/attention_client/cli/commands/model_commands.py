"""``attention models``, and the progress of a checkpoint that the server fetches."""

from contextlib import suppress
from typing import Annotated

import typer

from attention_client.cli.commands.command_table import group
from attention_client.cli.commands.graph_commands import graph
from attention_client.cli.commands.lens_commands import fit_lens
from attention_client.cli.commands.model_progress import loading_shown
from attention_client.cli.commands.probe_commands import fit_probe
from attention_client.cli.invocation import client_of
from attention_client.cli.tables.reply_output import AsJson, present
from attention_client.client import Client
from attention_contract.errors import AttentionError
from attention_contract.schemas.checkpoints import FetchProgress
from attention_contract.schemas.models import default_model_name

app = group("models")
app.command("fit-lens")(fit_lens)
app.command("fit-probe")(fit_probe)
app.command("graph")(graph)


def fetch_shown(client: Client, repository: str, revision: str | None = None) -> None:
    """Let the server fetch a checkpoint, with a bar on a terminal. An interrupt from the keyboard cancels it."""
    from rich.console import Console  # noqa: PLC0415 - `attention models` draws no bar, which takes 10 ms to import
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("fetching {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    shown = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=shown, transient=True, disable=not shown.is_terminal) as bar:
        task = bar.add_task(repository, total=None)

        def show(progress: FetchProgress) -> None:
            bar.update(task, completed=progress.bytes, total=progress.total_bytes)

        try:
            client.checkpoints.fetch(repository, revision=revision, on_progress=show)
        except KeyboardInterrupt:
            with suppress(AttentionError):  # it is there already
                client.checkpoints.cancel_fetch(repository)
            raise


@app.command("fetch")
def fetch_model(
    ctx: typer.Context,
    repository: Annotated[str, typer.Argument(help="A repository of the hub, as in openai-community/gpt2.")],
    revision: Annotated[str | None, typer.Option(help="A branch, a tag or a commit; default: the main branch.")] = None,
    as_json: AsJson = False,
) -> None:
    """Let the server fetch a model from the Hugging Face hub, and load it. Ctrl-C cancels the fetch."""
    with client_of(ctx) as client:
        fetch_shown(client, repository, revision)
        with loading_shown(client, default_model_name(repository)):
            reply = client.models.load(repository)
    present(reply, as_json)

"""``attention checkpoints``."""

from typing import Annotated

import typer

from attention_client.cli import completion
from attention_client.cli.invocation import client_of
from attention_client.cli.reply_output import AsJson, present


def checkpoints(
    ctx: typer.Context,
    path: Annotated[
        str | None,
        typer.Argument(autocompletion=completion.checkpoints, help="One of them: each of its attention layers."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the checkpoints of the server's model repository, or the attention layers of one; nothing is loaded."""
    with client_of(ctx) as client:
        present(client.checkpoints.list() if path is None else client.checkpoints.get(path), as_json)

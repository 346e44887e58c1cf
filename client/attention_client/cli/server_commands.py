"""``attention info``, ``variants``, ``hardware``, ``accuracy`` and ``checkpoints``: descriptions of a server."""

from typing import Annotated, Final

import typer

from attention_client.cli import completion
from attention_client.cli.invocation import client_of
from attention_client.cli.reply_output import AsJson, present
from attention_client.cli.request_commands import RequestCommand
from attention_contract import operations

COMMANDS: Final = {
    "info": RequestCommand(
        "server.info", operations.server_info, "Show the server: version, device, limits and memory."
    ),
    "variants": RequestCommand(
        "server.variants", operations.list_variants,
        "List every score, mask, position, normalizer, method and kernel that a spec can name.",
    ),
    "hardware": RequestCommand(
        "server.hardware", operations.list_hardware,
        "List the devices that --hardware may name, with the source of their figures.",
    ),
    "accuracy": RequestCommand(
        "server.accuracy", operations.accuracy,
        "Show how far the server's predictions of time were from what was measured.",
    ),
}  # fmt: skip


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

"""The end of a command: its reply as a picture, in a file, as JSON, or as tables for people."""

from collections.abc import Callable
from pathlib import Path

import typer

from attention_client import Client
from attention_client.cli import tensor_arguments
from attention_client.cli.invocation import ReplyT, client_of, present
from attention_client.cli.plot_options import PlotFile


def answer(
    ctx: typer.Context,
    call: Callable[[Client], ReplyT],
    show: Callable[[ReplyT], None],
    *,
    as_json: bool,
    plot_file: PlotFile | None = None,
    output: Path | None = None,
    chief: str | None = None,
) -> None:
    """Make the call, and draw its reply; or write it to ``output`` and print it, unless that is standard output.

    ``chief``: the tensor of a reply that a file of one tensor holds.
    """
    with client_of(ctx) as client:
        if plot_file is not None:
            plot_file.write(client, call)
            return
        reply = call(client)
    if output is not None:
        tensor_arguments.write(output, reply, chief)
    if as_json or not tensor_arguments.to_pipe(output):
        present(reply, as_json, show)

"""``attention sessions``."""

import typer

from attention_client.cli.command_table import group
from attention_client.cli.invocation import client_of
from attention_client.cli.request_commands import Id

app = group("sessions", "List, open, show and end the decode sessions of a server.")


@app.command()
def delete(ctx: typer.Context, id: Id) -> None:  # noqa: A002
    """End a session and free its memory."""
    with client_of(ctx) as client:
        client.sessions.delete(id)
    typer.echo(f"deleted {id}")

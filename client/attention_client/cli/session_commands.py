"""``attention sessions``."""

from typing import Final

import typer

from attention_client.cli.invocation import client_of
from attention_client.cli.model_options import Form
from attention_client.cli.request_commands import Id, RequestCommand, group
from attention_contract import operations

_LIST: Final = RequestCommand(
    "sessions.list", operations.list_sessions,
    "List every session below the one that it was forked from, with its shared and its own memory.",
)  # fmt: skip
_SHOW: Final = RequestCommand(
    "sessions.get", operations.get_session, "Show module, length, memory and expiry of one session."
)
_OPEN: Final = RequestCommand(
    "sessions.create", operations.open_session, "Open a session of a module and print its id.",
    forms={"from_": Form(metavar="ID", name="--from", read=lambda session, _: {"session": session})},
)  # fmt: skip
app = group("List, open, show and end the decode sessions of a server.", _LIST)
app.command("show")(_SHOW.command())
app.command("open")(_OPEN.command())


@app.command()
def delete(ctx: typer.Context, id: Id) -> None:  # noqa: A002
    """End a session and free its memory."""
    with client_of(ctx) as client:
        client.sessions.delete(id)
    typer.echo(f"deleted {id}")

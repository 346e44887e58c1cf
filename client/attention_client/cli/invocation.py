"""State and helpers of every command: the client, JSON output, and the end by an error."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import StreamHandler, getLogger
from typing import Annotated, Any, TypeVar

import httpx
import typer
from typer.core import TyperGroup

from attention_client.async_client import AsyncClient
from attention_client.client import Client
from attention_contract.base import WireModel
from attention_contract.errors import AttentionError
from attention_contract.schemas.recordings import TARGET_VARIABLE, TEXT_VARIABLE
from attention_contract.wire import to_json

ReplyT = TypeVar("ReplyT", bound=WireModel)
Text = Annotated[str, typer.Argument(help="The text to read.", envvar=TEXT_VARIABLE, show_envvar=False)]
Target = Annotated[
    str | None,
    typer.Option(help="The decoder's text, of a model with an encoder too.", envvar=TARGET_VARIABLE, show_envvar=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the reply as JSON, and nothing else.")]


@dataclass
class Invocation:
    """Address of the server, and settings of the client."""

    url: str | None = None
    timeout: float = 60.0
    retries: int | None = None
    transport: httpx.BaseTransport | None = None

    def client(self) -> Client:
        """Make a client of that server."""
        try:
            return Client(self.url, timeout=self.timeout, retries=self.retries, transport=self.transport)
        except ValueError as fault:
            raise typer.BadParameter(str(fault)) from None


class Commands(TyperGroup):
    """Commands that end with one paragraph on standard error if the service refuses."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override,unused-ignore]
        """Run the command. What the client warns of, its repeats, is told on standard error."""
        warnings = StreamHandler()
        warnings.setLevel("WARNING")
        log = getLogger("attention_client")
        log.addHandler(warnings)
        try:
            return super().invoke(ctx)
        except AttentionError as fault:
            known_as = f" (request {fault.request_id})" if fault.request_id else ""
            typer.echo(f"{fault.title}: {fault.detail}{known_as}", err=True)
            raise typer.Exit(1) from None
        finally:
            log.removeHandler(warnings)


def client_of(ctx: typer.Context) -> Client:
    """Make the client that the global options ask for."""
    return ctx.ensure_object(Invocation).client()


def ask(client: Client | AsyncClient, operation: str, name: str | None, fields: Mapping[str, Any]) -> Any:
    """Send one of the operations forward, weights, gradients and complexity, to a module or, without a name, raw.

    Returns the reply, or of an AsyncClient its awaitable.
    """
    if name is None:
        return getattr(client.attention, operation)(**fields)
    return getattr(client, operation)(name, **fields)


def print_json(reply: WireModel) -> None:
    """Print the reply as one line of JSON."""
    typer.echo(to_json(reply))


def present(reply: ReplyT, as_json: bool, show: Callable[[ReplyT], None]) -> None:
    """Print the reply as JSON, or as a table for people."""
    print_json(reply) if as_json else show(reply)

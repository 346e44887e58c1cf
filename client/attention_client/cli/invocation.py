"""State and helpers of every command: the client, its calls, and the end by an error."""

from collections.abc import Mapping
from dataclasses import dataclass
from logging import StreamHandler, getLogger
from operator import attrgetter
from typing import Any

import httpx
import typer
from typer.core import TyperGroup

from attention_client.async_client import AsyncClient
from attention_client.client import Client
from attention_contract.errors import AttentionError


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
    """Commands that end with one paragraph on standard error if the service refuses, or a file cannot be written."""

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
        except BrokenPipeError:  # the reader has read enough
            raise
        except OSError as fault:
            typer.echo(f"{fault.filename or 'the output'}: {fault.strerror}", err=True)
            raise typer.Exit(1) from None
        finally:
            log.removeHandler(warnings)


def client_of(ctx: typer.Context) -> Client:
    """Make the client that the global options ask for."""
    return ctx.ensure_object(Invocation).client()


def send(client: Client | AsyncClient, method: str, name: str | None, fields: Mapping[str, Any]) -> Any:
    """Call a client's method by its dotted name, with a NAME or, for raw attention, without.

    Returns the reply, or of an AsyncClient its awaitable.
    """
    if name is not None:
        return attrgetter(method)(client)(name, **fields)
    return attrgetter(method if "." in method else f"attention.{method}")(client)(**fields)

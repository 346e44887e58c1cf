"""State and helpers of every command: the client, its calls, and the end by an error."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import StreamHandler, getLogger
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import typer

from attention_client.cli.lazy_commands import EveryCommand

if TYPE_CHECKING:
    import httpx

    from attention_client.async_client import AsyncClient
    from attention_client.cli.reached_server import ReachedServer
    from attention_client.client import Client

_UNUSED: Final = ("httpx._main", "h2")
"""Parts of httpx that it takes if they are there: its own command, which draws source code, and HTTP/2."""


@dataclass
class Invocation:
    """Address of the server, and settings of the client."""

    url: str | None = None
    timeout: float = 60.0
    retries: int | None = None
    transport: "httpx.BaseTransport | None" = None

    def reached(self) -> "ReachedServer":
        """Return the server, which is started in the background if none is named and none is there.

        A server that is named may come up while its call is repeated, if ``retries`` says so. Raises ConnectionFailed
        and ServerNotStarted.
        """
        from attention_client.cli import reached_server  # noqa: PLC0415 - --help and --version ask no server

        if self.transport is not None or (self.url is not None and self.retries is not None):
            return reached_server.ReachedServer(self.url)
        return reached_server.unnamed() if self.url is None else reached_server.named(self.url)

    def client(self) -> "Client":
        """Make a client of that server. Raises what ``reached`` does."""
        from attention_client.client import Client  # noqa: PLC0415 - --help and --version need none

        try:
            url, key = self.reached()
            return Client(url, timeout=self.timeout, retries=self.retries, transport=self.transport, api_key=key)
        except ValueError as fault:
            raise typer.BadParameter(str(fault)) from None


class Commands(EveryCommand):
    """Commands that end with one paragraph on standard error if the service refuses, or a file cannot be written."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. What the client warns of, its repeats, is told on standard error."""
        with _without(*_UNUSED):
            import httpcore  # noqa: F401, PLC0415
            import httpx  # noqa: F401, PLC0415
        from attention_contract.errors import AttentionError  # noqa: PLC0415

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


@contextmanager
def _without(*modules: str) -> Iterator[None]:
    """Have the imports within find no such modules, unless they are imported already."""
    hidden = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def client_of(ctx: typer.Context) -> "Client":
    """Make the client that the global options ask for."""
    return ctx.ensure_object(Invocation).client()


def send(client: "Client | AsyncClient", method: str, name: str | None, fields: Mapping[str, Any]) -> Any:
    """Call a client's method by its dotted name, with a NAME or, for raw attention, without.

    Returns the reply, or of an AsyncClient its awaitable.
    """
    if name is not None:
        return attrgetter(method)(client)(name, **fields)
    return attrgetter(method if "." in method else f"attention.{method}")(client)(**fields)

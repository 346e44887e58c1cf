"""The ``attention`` command: the client's calls at the shell, and ``attention serve`` if the server is installed.

Exit status: 0 for success, 1 if the service or the connection refused, 2 if the command line is wrong.
Repeated attempts are logged on standard error.
"""

import gc
from importlib import metadata
from typing import Annotated

import typer

from attention_client.cli.invocation import Commands, Invocation
from attention_client.environment import DEFAULT_URL, URL_VARIABLE

app = typer.Typer(
    name="attention",
    cls=Commands,
    help="Ask a server about attention: output, weights, gradients and cost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(metadata.version("attention-service"))
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(envvar=URL_VARIABLE, help=f"Address of the server.  [dim]\\[default: {DEFAULT_URL}][/dim]"),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one call may take, retries included.")] = 60.0,
    retries: Annotated[
        int | None,
        typer.Option(min=0, help="Repeats after a transient failure.  [dim]\\[default: for 40 seconds][/dim]"),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Ask a server about attention: output, weights, gradients and cost."""
    invocation = ctx.ensure_object(Invocation)
    invocation.url, invocation.timeout, invocation.retries = url, timeout, retries


def main() -> None:
    """Run the command line."""
    gc.set_threshold(200_000)  # the imports make 130,000 objects and no garbage, which collections look for in vain
    app()


__all__ = ["app", "main"]

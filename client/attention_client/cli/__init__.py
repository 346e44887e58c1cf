"""The ``attention`` command: the client's calls at the shell, and ``attention serve`` where the server is installed.

Exit status: 0 when it worked, 1 when the service or the connection refused, 2 when the command line is wrong.
"""

from importlib import metadata
from typing import Annotated

import stamina.instrumentation
import typer

from attention_client.cli import compare, compute, cost, hopfield, modules, server
from attention_client.cli.extensions import add_extensions
from attention_client.cli.session import Commands, Session
from attention_client.route import DEFAULT_URL

app = typer.Typer(
    name="attention",
    cls=Commands,
    help="Ask attention modules what they output, look at, change by and cost.",
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
        typer.Option(envvar="ATTENTION_URL", help=f"Where the server is.  [dim]\\[default: {DEFAULT_URL}][/dim]"),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one call may take, retries included.")] = 60.0,
    retries: Annotated[int, typer.Option(help="How often to repeat after a transient failure.")] = 3,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Ask attention modules what they output, look at, change by and cost."""
    session = ctx.ensure_object(Session)
    session.url, session.timeout, session.retries = url, timeout, retries
    stamina.instrumentation.set_on_retry_hooks([])  # what a retry has to say must not mix with the output


app.add_typer(modules.app, name="modules")
app.command("import")(modules.import_module)
app.command()(compute.forward)
app.command()(compute.weights)
app.command()(compute.gradients)
app.command()(compare.compare)
app.command()(cost.complexity)
app.command()(cost.hardware)
app.command()(cost.accuracy)
app.command()(hopfield.hopfield)
app.command()(server.info)
app.command()(server.variants)
add_extensions(app)


def main() -> None:
    """Run the command line."""
    app()


__all__ = ["app", "main"]

"""The ``attention`` command: the client's calls at the shell, and ``attention serve`` if the server is installed.

Exit status: 0 for success, 1 if the service or the connection refused, 2 if the command line is wrong.
Repeated attempts are logged on standard error.
"""

from importlib import metadata
from typing import Annotated, Final

import typer
from typer.models import CommandInfo, TyperInfo

from attention_client.cli import (
    bench_commands,
    command_table,
    compare_commands,
    explain_commands,
    fetch_commands,
    generation_commands,
    module_commands,
    recording_commands,
    survey_commands,
)
from attention_client.cli.extensions import add_extensions
from attention_client.cli.invocation import Commands, Invocation
from attention_client.connection_settings import DEFAULT_URL

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
        typer.Option(envvar="ATTENTION_URL", help=f"Address of the server.  [dim]\\[default: {DEFAULT_URL}][/dim]"),
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


app.add_typer(module_commands.app, name="modules")
app.command()(module_commands.checkpoints)
app.command("import")(module_commands.import_module)
for name, each in command_table.COMMANDS.items():
    if " " not in name:
        app.command(name)(each.command())
app.command("compare")(compare_commands.compare_command)
app.command()(bench_commands.bench)
app.command()(survey_commands.heads)
app.command()(generation_commands.generate)
app.command()(generation_commands.chat)
app.command("explain")(explain_commands.explain_command)
app.command()(recording_commands.record)
app.command()(recording_commands.show)
app.add_typer(recording_commands.app, name="recordings")
models = command_table.group("models", "List, fetch, load, use and unload the whole models of a server.")
models.command("fetch")(fetch_commands.fetch_model)
app.add_typer(models, name="models")
app.add_typer(
    command_table.group("sessions", "List, open, show and end the decode sessions of a server."), name="sessions"
)
add_extensions(app)

PANELS: Final = {
    "Ask a whole model": ("look", "heads", "generate", "chat", "record", "show"),
    "Ask a module, or of raw q, k and v": (
        "forward", "weights", "gradients", "complexity", "attribution", "effects", "circuits", "explain", "compare",
    ),
    "Compute from files": ("rollout", "similarity", "hopfield"),
    "Keep": ("models", "modules", "checkpoints", "import", "fetch", "sessions", "recordings"),
    "Run and measure a server": ("serve", "keys", "info", "variants", "hardware", "accuracy", "bench"),
}  # fmt: skip
"""The panels of the help, and the commands in each; others' commands come last."""


def _word(known: CommandInfo | TyperInfo) -> str:
    return str(known.name or getattr(known.callback, "__name__", ""))


_places = {word: (at, panel) for at, (word, panel) in enumerate((w, p) for p, words in PANELS.items() for w in words)}
app.registered_commands.sort(key=lambda known: _places.get(_word(known), (len(_places), ""))[0])
_known: list[CommandInfo | TyperInfo] = [*app.registered_commands, *app.registered_groups]
for known in _known:
    known.rich_help_panel = _places.get(_word(known), (0, "Others"))[1]


def main() -> None:
    """Run the command line."""
    app()


__all__ = ["app", "main"]

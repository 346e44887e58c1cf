"""Commands that other packages contribute through the entry-point group ``attention.commands``.

Such an entry point is a function that takes the remaining arguments as a list of strings and returns the exit status.
It is loaded when its command is called, not before.
"""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

import typer

GROUP = "attention.commands"
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_SUMMARIES = {
    "serve": "Start the server (its own options: attention serve --help).",
    "fetch": "Download a checkpoint from the Hugging Face hub into the model repository of this machine.",
    "keys": "Create, list and revoke the API keys of the server on this machine.",
}


def add_extensions(app: typer.Typer) -> None:
    """Add every contributed command to the app."""
    for entry in entry_points(group=GROUP):
        summary = _SUMMARIES.get(entry.name, f"From {entry.value.partition('.')[0]}.")
        app.command(entry.name, help=summary, context_settings=dict(_PASS_ON))(_command(entry))


def run_extension(name: str, arguments: list[str]) -> None:
    """Run a contributed command. Raises typer.Exit with its status if it fails or if no package contributes it."""
    found = [entry for entry in entry_points(group=GROUP) if entry.name == name]
    if not found:
        typer.echo(f"attention {name} needs the server's package: pip install 'attention-service[server]'", err=True)
        raise typer.Exit(1)
    status = _load(found[0])(arguments)
    if status:
        raise typer.Exit(status)


def _command(entry: EntryPoint) -> Callable[[typer.Context], None]:
    def command(ctx: typer.Context) -> None:
        raise typer.Exit(_load(entry)(list(ctx.args)) or 0)

    return command


def _load(entry: EntryPoint) -> Callable[[list[str]], int | None]:
    try:
        loaded: Callable[[list[str]], int | None] = entry.load()
    except ModuleNotFoundError as fault:
        if fault.name is None or fault.name.startswith(entry.value.partition(".")[0]):
            raise  # the package's own fault
        typer.echo(
            f"attention {entry.name} needs {fault.name}, which is missing: pip install 'attention-service[server]'",
            err=True,
        )
        raise typer.Exit(1) from None
    return loaded

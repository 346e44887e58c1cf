"""Commands that packages contribute through the entry-point group ``attention.commands``.

Such an entry point is a function that takes the remaining arguments as a list of strings and returns the exit status.
It is loaded when its command is called, not before.
"""

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points

import typer

from attention_client.environment import COMMAND_GROUP


def contributed() -> Iterator[tuple[str, str]]:
    """Yield the name of each contributed command, and a summary."""
    for entry in entry_points(group=COMMAND_GROUP):
        yield entry.name, f"From {entry.value.partition('.')[0]}."


def extension(name: str) -> Callable[[typer.Context], None]:
    """Return a contributed command."""

    def command(ctx: typer.Context) -> None:
        run_extension(name, list(ctx.args))

    return command


def run_extension(name: str, arguments: list[str]) -> None:
    """Run a contributed command. Raises typer.Exit with its status if it fails or if no package contributes it."""
    entries = [entry for entry in entry_points(group=COMMAND_GROUP) if entry.name == name]
    if not entries:
        typer.echo(f"attention {name} needs the server's package: pip install 'attention-service[server]'", err=True)
        raise typer.Exit(1)
    status = _load(entries[0])(arguments)
    if status:
        raise typer.Exit(status)


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

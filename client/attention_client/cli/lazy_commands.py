"""Commands that are listed before their code is imported."""

from collections.abc import Callable, Iterable
from functools import cached_property, partial
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from attention_client.cli.command_index import CODE, EXTENSION, OTHERS, PANELS, REQUEST, CommandEntry
from attention_client.cli.extensions import contributed, extension


class Listed(TyperCommand):
    """A command by its name and summary. Its code is imported and its options are made when it is called."""

    def __init__(self, name: str, summary: str, panel: str | None, make: Callable[[], Any]) -> None:
        super().__init__(name, help=summary, rich_help_panel=panel)
        self._make = make
        self.takes_url = False
        """True for a command of a group that takes ``--url`` behind it."""

    @cached_property
    def command(self) -> Any:
        """The command itself."""
        return _taking_url(self._make()) if self.takes_url else self._make()

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Make the context of the command itself, which takes the place of this one."""
        return self.command.make_context(info_name, args, parent, **extra)


def listing(listed: Iterable[Listed]) -> type[TyperGroup]:
    """Return a class of groups that begin with these commands."""

    class Listing(TyperGroup):
        def __init__(self, *, commands: Any = None, **settings: Any) -> None:
            first: dict[str, Any] = {command.name: command for command in listed if command.name is not None}
            super().__init__(commands=first | dict(commands or {}), **settings)

    return Listing


def command_of(name: str, function: Callable[..., Any], **settings: Any) -> Any:
    """Return the command that calls a function with the values of its options."""
    alone = typer.Typer(add_completion=False)
    alone.command(name, **settings)(function)
    return get_command(alone)


class EveryCommand(TyperGroup):
    """The commands of the index, and those that other packages contribute."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for panel, entries in PANELS.items():
            for name, entry in entries.items():
                self.commands[name] = Listed(name, entry.summary, panel, partial(_made, name, entry))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None if there is none of this name."""
        if cmd_name not in self.commands:
            self._add_contributed()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        self._add_contributed()
        return super().list_commands(ctx)

    def _add_contributed(self) -> None:
        for name, summary in contributed():
            if name not in self.commands:
                self.commands[name] = Listed(
                    name, summary, OTHERS, partial(_made, name, CommandEntry(EXTENSION, summary))
                )


def _made(name: str, entry: CommandEntry) -> Any:
    """Import the code of an entry, and return its command."""
    if entry.place == EXTENSION:
        takes_all = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
        return command_of(name, extension(name), help=entry.summary, context_settings=takes_all)
    module, _, attribute = entry.place.partition(":")
    code = import_module(f"{CODE}{module}")
    if entry.place == REQUEST:
        return _taking_url(command_of(name, code.COMMANDS[name].command()))
    imported = getattr(code, attribute)
    return _taking_url(get_command(imported) if isinstance(imported, typer.Typer) else command_of(name, imported))


def _taking_url(command: Any) -> Any:
    """Let a command, and those of a group, take ``--url`` behind them too."""
    command.params.append(command_of("url", _url_alone).params[0])
    for entry in getattr(command, "commands", {}).values():
        if isinstance(entry, Listed):
            entry.takes_url = True
        else:
            _taking_url(entry)
    return command


def _name_server(ctx: typer.Context, url: str | None) -> None:
    if url is not None:
        ctx.obj.url = url


def _url_alone(
    server_url: Annotated[
        str | None,
        typer.Option(
            "--url", callback=_name_server, expose_value=False, help="Address of the server, as before the command."
        ),
    ] = None,
) -> None:
    """Take the option that every command has beside its own."""

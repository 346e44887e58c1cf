"""The ``attention`` command in this process. Typer would make its subcommands anew for each run, which takes 40 ms."""

from functools import cache
from typing import Any

from click import Command
from click.testing import CliRunner, Result
from typer.main import get_command

from attention_client.cli import app


@cache
def _command() -> Command:
    return get_command(app)


def invoke(arguments: list[str], **options: Any) -> Result:
    """Run the command with these arguments, and return what it printed and its status."""
    return CliRunner().invoke(_command(), arguments, **options)

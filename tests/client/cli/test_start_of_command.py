"""The start of the command: the packages that it imports, and the processor time that it takes."""

import os
import resource
import subprocess
import sys

import pytest
from typer.main import get_command

from attention_client.cli import app
from attention_client.cli.command_index import PANELS

SAY_MODULES = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
from attention_client.cli import main
main()
"""
OF_A_REQUEST = {"numpy", "httpx", "httpcore", "pydantic", "ssl", "attention_contract"}
NEVER = {"aiohttp", "h2", "matplotlib", "scipy", "torch", "transformers", "attention_service"}
OF_OTHER_COMMANDS = {"asyncio", "websockets", "pygments", "rich.progress", "attention_client.recording"}
START_S = 1.0
"""Processor seconds of a start on a busy machine; half of it on a quiet one, and a tenth for the version."""


def run(server, *arguments, code=SAY_MODULES):
    """Run the command in a process of its own; bytecode is written, as in an installed package."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=variables | {"ATTENTION_URL": server},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


@pytest.mark.sampled(arguments=2, without=2)
@pytest.mark.parametrize(
    ("arguments", "without"),
    [
        (["--version"], OF_A_REQUEST | NEVER | {"rich"}),
        (["--help"], OF_A_REQUEST | NEVER),
        (["models"], NEVER | OF_OTHER_COMMANDS),
        (["info"], NEVER | OF_OTHER_COMMANDS | {"attention_client.survey"}),
    ],
)
def test_a_command_imports_what_it_needs(server, arguments, without):
    assert without & {*run(server, *arguments).stderr.split()} == set()


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["models"]])
@pytest.mark.slow
def test_a_command_starts_soon(server, arguments):
    def seconds():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(server, *arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < START_S


def test_every_command_of_the_list_is_there_and_tells_the_same():
    listed = get_command(app).commands
    summaries = {name: entry.summary for entries in PANELS.values() for name, entry in entries.items()}
    assert {name: each.help for name, each in listed.items()} == summaries
    for name, each in listed.items():
        assert (name, " ".join(each.command.help.partition("\n\n")[0].split())) == (name, summaries[name])

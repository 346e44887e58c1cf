"""Commands without a server: one is started for all of them, or one line says what to do."""

import json
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from attention_client.errors import ServerNotStarted
from attention_client.servers import background_server, started_server
from tests.client.cli.command_line import invoke

COMMAND = """
import sys
from attention_client import environment
environment.DEFAULT_URL = sys.argv.pop(1)
{before}
from attention_client.cli import main
main()
"""
"""The command with another default address."""
AT_MOST_S = 20.0
"""Seconds on a busy machine; without a limit, the repeats of a call take 40."""


def dead_url():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def begin(tmp_path):
    """Return a function that starts a command; the server of this test is ended with the test."""
    variables = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "ATTENTION_MODELS_DIR": str(tmp_path / "models")}

    def begin(*arguments, url=None, before="", **own):
        code = COMMAND.format(before=before)
        command = [sys.executable, "-c", code, url or dead_url(), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=variables | {"ATTENTION_AUTOSTART": "true"} | own, **pipes)

    yield begin
    if (tmp_path / "attention").exists():
        begin("stop").communicate(timeout=60)


def ended(command):
    """The exit status, the standard output and the standard error of a command, once it has ended."""
    out, err = command.communicate(timeout=120)
    return command.returncode, out, err


@pytest.mark.long
def test_two_commands_start_one_server_that_stop_ends(begin, tmp_path):
    pytest.importorskip("torch")
    both = [ended(each) for each in [begin("info", "--json"), begin("info", "--json")]]
    assert [status for status, _, _ in both] == [0, 0], both
    (line,) = "".join(err for _, _, err in both).splitlines()
    record = tmp_path / "attention" / "server.json"
    told = json.loads(record.read_text())
    assert told["url"] in line
    assert f"process {told['pid']}" in line
    assert "`attention stop`" in line
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert stat.S_IMODE(record.parent.stat().st_mode) == 0o700
    server = psutil.Process(told["pid"])
    assert "--idle-exit-s=600" in server.cmdline()
    assert httpx.get(f"{told['url']}/v1").status_code == 401

    script = tmp_path / "browser"
    script.write_text(f'#!/bin/sh\nprintf %s "$1" > {tmp_path / "opened"}\n')
    script.chmod(0o700)
    status, _, _ = ended(begin("open", BROWSER=str(script)))
    assert status == 0
    file = Path(urlsplit((tmp_path / "opened").read_text()).path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (leads_to,) = set(re.findall(r'http://[^"]+', file.read_text()))
    assert told["key"] in leads_to
    answer = httpx.get(leads_to)
    assert answer.has_redirect_location
    assert answer.headers["location"] == f"{told['url']}/"

    status, out, _ = ended(begin("stop"))
    assert (status, told["url"] in out) == (0, True)
    assert psutil.wait_procs([server], 10)[1] == []
    assert "no server of yours" in ended(begin("stop"))[2]


@pytest.mark.parametrize(
    ("arguments", "variables", "before", "message"),
    [
        (["--url", "dead", "info"], {}, "", "--url or ATTENTION_URL names"),
        pytest.param(["info", "--url", "dead"], {}, "", "--url or ATTENTION_URL names", marks=pytest.mark.slow),
        pytest.param(["info"], {"ATTENTION_URL": "dead"}, "", "--url or ATTENTION_URL names", marks=pytest.mark.slow),
        (["info"], {"ATTENTION_AUTOSTART": "false"}, "", "ATTENTION_AUTOSTART=false forbids"),
        (
            ["info"],
            {},
            "sys.modules['torch'] = None",
            r"(torch|fastapi) is missing.*attention-service\[server,transformers\]",
        ),
        pytest.param(
            ["open"], {"ATTENTION_AUTOSTART": "0"}, "", "ATTENTION_AUTOSTART=0 forbids", marks=pytest.mark.slow
        ),
    ],
)
def test_one_line_says_what_to_do_if_none_is_to_be_started(begin, arguments, variables, before, message):
    url = dead_url()
    arguments = [url if each == "dead" else each for each in arguments]
    variables = {name: url if value == "dead" else value for name, value in variables.items()}
    command = begin(*arguments, before=before, **variables)
    out, err = command.communicate(timeout=AT_MOST_S)
    assert (command.returncode, out) == (1, "")
    (line,) = err.splitlines()
    assert re.search(message, line), line


def test_a_server_at_the_default_address_is_asked_and_none_is_started(server, begin, tmp_path):
    assert ended(begin("info", "--json", url=server))[0] == 0
    assert not (tmp_path / "attention").exists()


@pytest.mark.parametrize("command", [["info"], ["modules"], ["modules", "list"], ["models", "list"]])
def test_the_address_may_stand_behind_a_command(server, command):
    result = invoke([*command, "--url", server, "--json"])
    assert result.exit_code == 0, result.output
    assert "--url" in invoke([*command, "--help"]).stdout


def test_a_server_whose_starter_was_killed_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(started_server, "command_of", lambda _: sleeps)
    begun = []

    def killed(self, *_):
        begun.append(self.process)
        raise SystemError("killed")

    monkeypatch.setattr(started_server.StartedServer, "wait", killed)
    with pytest.raises(SystemError):
        background_server.running_or_started()
    assert background_server._is_alive()
    assert background_server.running() is None
    assert begun[0].wait(10) != 0
    assert not background_server._is_alive()


def test_a_folder_that_others_can_open_keeps_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "attention").mkdir(mode=0o755)
    with pytest.raises(ServerNotStarted, match="others can open it"):
        background_server.runtime_folder()

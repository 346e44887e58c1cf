"""Servers that a program starts for itself: they answer it alone, and end with it, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

import attention_client
from attention_client import ServerNotStarted, async_local, local
from attention_client.servers import server_command, started_server

pytestmark = pytest.mark.long

pytest.importorskip("torch")
SHARED = Path("/dev/shm")  # noqa: S108 - it is looked at alone
GONE_S = 3.0
"""Seconds within which a server ends after the program that started it was killed."""
PROGRAM = """
import os, sys
from attention_client import local
client = local(sys.argv[1])
client.models.forward("tiny", "the cat")
if os.fork() == 0:  # a worker that outlives the program
    import time
    time.sleep(60)
    os._exit(0)
print(client._started.process.pid, flush=True)
sys.stdin.read()
"""


def shared_memory():
    return {entry.name for entry in SHARED.iterdir()} if SHARED.is_dir() else set()


def test_a_server_answers_its_client_alone_and_ends_with_it(tmp_path, capsys):
    with local(tmp_path, max_modules=3) as client:
        assert client.server.info().name == "attention-service"
        assert httpx.get(f"{client._started.url}/v1").status_code == 401
        with client.with_options(timeout=5):
            pass
        assert client.modules.list().modules == []  # the other client has left the server
        server = psutil.Process(client._started.process.pid)
        assert f"--models-dir={tmp_path}" in server.cmdline()
        assert "--max-modules=3" in server.cmdline()
    assert not server.is_running()
    client.close()
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
async def test_the_awaited_client_has_the_same(tmp_path):
    async with async_local(tmp_path, log_level="error") as client:
        assert (await client.server.info()).name == "attention-service"
        process = client._started.process
    assert process.poll() is not None


def test_a_killed_program_leaves_no_process_and_no_memory(tmp_path):
    shared = shared_memory()
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    with program, program.stdin, program.stdout:
        try:
            server = psutil.Process(int(program.stdout.readline()))
            every = [server, *server.children(recursive=True)]
            assert len(every) > 1  # the process of the model
            program.kill()
            program.wait()
            killed = time.monotonic()
            _, left = psutil.wait_procs(every, GONE_S)
            assert left == []
            assert time.monotonic() - killed < GONE_S
            assert shared_memory() <= shared
        finally:
            os.killpg(program.pid, signal.SIGKILL)  # the worker


def test_a_server_ends_when_it_is_forgotten_but_not_by_a_fork(tmp_path, monkeypatch):
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(started_server, "command_of", lambda _: sleeps)
    server = started_server.StartedServer({}, (tmp_path / "log").open("w+b"))
    server.end_with_this()
    process, log, owner = server.process, server._log, os.getpid()
    started_server.end(process, log, owner + 1)
    if (fork := os.fork()) == 0:
        server.end()
        os._exit(0)
    os.waitpid(fork, 0)
    assert process.poll() is None
    del server
    assert process.poll() == -signal.SIGTERM
    assert log.closed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_budgt": "2GB"}, "memory_budgt: .*did you mean memory_budget"),
        ({"host": "0.0.0.0"}, "host: .*sets it itself"),
        ({"port": 80}, "port: .*sets it itself"),
    ],
)
def test_a_name_that_is_no_setting_is_refused_before_anything_starts(monkeypatch, settings, message):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(TypeError, match=message):
        local(**settings)


def test_a_server_that_ends_while_it_starts_tells_why(tmp_path):
    with pytest.raises(ServerNotStarted, match=r"(?s)status 2.*ATTENTION_MEMORY_BUDGET.*greater than 0"):
        local(tmp_path, memory_budget=0)


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setattr(server_command, "find_spec", {"attention_service": True}.get)
    with pytest.raises(ServerNotStarted, match=r"fastapi is missing.*attention-service\[server,transformers\]"):
        attention_client.local()

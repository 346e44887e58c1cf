"""The ``attention`` command for many short runs: one process imports it, and each run is a fork of that process.

``command_folder()`` has a script ``attention`` for the front of a shell's path. It hands its arguments, environment,
folder and standard streams to the process and ends with the status of the run. To import the command takes most of a
short run's time.
"""

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPT = """#!{python} -IS
import json, os, socket, sys
run = socket.socket(socket.AF_UNIX)
run.connect({address!r})
told = json.dumps([sys.argv, dict(os.environ), os.getcwd()]).encode() + bytes(1)
sent = socket.send_fds(run, [told], [0, 1, 2])
run.sendall(told[sent:])
sys.exit((run.recv(1) or bytes([1]))[0])
"""


@cache
def command_folder() -> Path:
    """The folder of the script, whose process lives as long as this one."""
    folder = Path(tempfile.mkdtemp(prefix="command-"))
    address, script = str(folder / "socket"), folder / "attention"
    script.write_text(SCRIPT.format(python=sys.executable, address=address))
    script.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.docs.command_process", address],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )

    def end() -> None:
        process.kill()
        process.wait()
        shutil.rmtree(folder)

    atexit.register(end)
    assert process.stdout is not None
    with process.stdout as ready:
        assert ready.readline() == b"ready\n"
    return folder


def main(address: str) -> None:
    """Import the command, and fork for each run."""
    from attention_client.cli import main as command

    for name in (
        "commands.command_table",
        "commands.generation_commands",
        "commands.module_commands",
        "commands.recording_commands",
        "explain.explain_commands",
    ):
        import_module(f"attention_client.cli.{name}")

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a run but its script
        while True:
            run, _ = listener.accept()
            with run:
                if os.fork() == 0:
                    listener.close()
                    os._exit(_answer(run, command))


def _answer(run: socket.socket, command: Any) -> int:
    message, streams, *_ = socket.recv_fds(run, 2**16, 3)
    while not message.endswith(b"\0"):
        message += run.recv(2**16)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.argv, environment, folder = json.loads(message[:-1])
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    status = _status(command)
    run.sendall(bytes([status]))
    return status


def _status(command: Any) -> int:
    """Run the command, and return the exit status that an interpreter would end with."""
    try:
        try:
            command()
            status: Any = 0
        except SystemExit as end:
            status = end.code or 0
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        return 120
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return status if isinstance(status, int) else 1


if __name__ == "__main__":
    main(sys.argv[1])

"""The server that the commands of one user share: the first command starts it, and it ends when nobody asks.

The user's runtime folder, which nobody else can read, holds what the commands know of it:

    start.lock    held by the command that starts or stops the server, while the others wait
    life.lock     held by the server as long as it lives
    server.json   address, process id and key of the server
    server.log    its log
"""

import fcntl
import json
import os
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from attention_client.errors import ServerNotStarted
from attention_client.servers.started_server import StartedServer

IDLE_EXIT_S: Final = 600
"""Seconds without a request after which it ends, unless ``ATTENTION_IDLE_EXIT_S`` says otherwise."""
_IDLE_VARIABLE: Final = "ATTENTION_IDLE_EXIT_S"
_STOP_S: Final = 10.0
_LOOK_S: Final = 0.05


@dataclass(frozen=True)
class BackgroundServer:
    """A server that runs in the background."""

    url: str
    pid: int
    key: str
    answers: bool
    """False if the command that started it has not seen it answer."""


def runtime_folder() -> Path:
    """Return the user's folder, which is made. Raises ServerNotStarted if others could read or change it."""
    given = Path(os.environ.get("XDG_RUNTIME_DIR") or "-")
    folder = given / "attention" if given.is_dir() else Path(tempfile.gettempdir(), f"attention-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise ServerNotStarted(f"{folder} is to hold the key of a server, but others can open it; remove it")
    return folder


def running() -> BackgroundServer | None:
    """Return the server that runs; None if there is none. Waits for a command that is starting it."""
    with _locked(runtime_folder() / "start.lock"):
        return _running()


def running_or_started() -> BackgroundServer:
    """Return the server that runs, or start one, of which a line on standard error tells. Raises ServerNotStarted."""
    with _locked(runtime_folder() / "start.lock"):
        return _running() or _start()


def stop() -> BackgroundServer | None:
    """End the server, and return it once it has ended; None if there was none."""
    with _locked(runtime_folder() / "start.lock"):
        if (server := _running()) is not None:
            _end(server)
        return server


def record_file() -> Path:
    """Return the file with the address, the process id and the key."""
    return runtime_folder() / "server.json"


def written(name: str, text: str) -> Path:
    """Write a file of the folder, which only the user can read, whole or not at all, and return its path."""
    path = runtime_folder() / name
    staged = path.with_name(f"{name}.new")
    with _opened(staged) as file:
        file.truncate(0)
        file.write(text.encode())
    return staged.replace(path)


def _running() -> BackgroundServer | None:
    if not _is_alive():
        return None
    try:
        server = BackgroundServer(**json.loads(record_file().read_text("utf-8")))
    except (OSError, ValueError, TypeError) as fault:
        raise ServerNotStarted(f"a server runs, but {record_file()} does not tell of it: {fault}") from None
    if not server.answers:  # the command that started it was killed
        _end(server)
        return None
    return server


def _start() -> BackgroundServer:
    folder = runtime_folder()
    settings: dict[str, Any] = {} if os.environ.get(_IDLE_VARIABLE) else {"idle_exit_s": IDLE_EXIT_S}
    with _opened(folder / "life.lock") as life, _opened(folder / "server.log") as log:
        fcntl.flock(life, fcntl.LOCK_EX)
        server = StartedServer(settings, log, kept_open=[life.fileno()])
        _write(server, answers=False)
        server.wait(f" (process {server.process.pid}), which ends when idle or by `attention stop`")
        server.leave()
        return _write(server, answers=True)


def _write(server: StartedServer, *, answers: bool) -> BackgroundServer:
    """Write the record."""
    made = BackgroundServer(server.url, server.process.pid, server.key, answers)
    written(record_file().name, json.dumps(asdict(made)))
    return made


def _end(server: BackgroundServer) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.kill(server.pid, sign)  # it holds its lock, so that no other process has its number
        deadline = time.monotonic() + _STOP_S
        while _is_alive() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)


def _is_alive() -> bool:
    """Return True if a server holds its lock. It has the file open, and lets it go when it ends, however it ends."""
    with _opened(runtime_folder() / "life.lock") as life:
        try:
            fcntl.flock(life, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock while the block runs."""
    with _opened(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _opened(path: Path) -> Any:
    """Open a file of the user's alone, to be read and written."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")

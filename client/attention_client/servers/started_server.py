"""``StartedServer``: a server in a process of its own, on a free loopback port, with a key that only its maker has."""

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from hashlib import sha256
from http.client import HTTPConnection, HTTPException
from typing import IO, Final
from weakref import finalize

from attention_client.errors import ServerNotStarted
from attention_client.servers.server_command import CHOSEN, DEFAULTS, command_of

HOST: Final = "127.0.0.1"
_START_S: Final = 300.0
"""Seconds for a start; from a cold disk, PyTorch takes a minute to import."""
_LOOK_S: Final = 0.03
_STOP_S: Final = 10.0
_LAST_LINES: Final = 12
"""Lines of a server that died which its error shows."""
_TAKEN: Final = "cannot listen on"
"""Words of a server that finds its port taken."""


class StartedServer:
    """A server that is starting. ``wait`` returns once it answers."""

    def __init__(self, settings: Mapping[str, object], log: IO[bytes], kept_open: Collection[int] = ()) -> None:
        """Start it. It writes to ``log``, and holds the files ``kept_open``."""
        self.key = f"attn_{secrets.token_urlsafe(32)}"
        unset = {name: value for name, value in DEFAULTS.items() if not os.environ.get(f"ATTENTION_{name.upper()}")}
        self._settings = {**unset, **settings, **CHOSEN, "key_hash": sha256(self.key.encode()).hexdigest()}
        self._log = log
        self._kept_open = kept_open
        self._owner = os.getpid()
        self._start()

    def _start(self) -> None:
        with socket.create_server((HOST, 0)) as free:
            self.port: int = free.getsockname()[1]
        self._log.truncate(0)
        # A session of its own: what interrupts the program, as Ctrl-C does, is not meant for the server.
        self.process = subprocess.Popen(  # noqa: S603
            command_of({**self._settings, "port": self.port}),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=self._kept_open,
            start_new_session=True,
        )

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{HOST}:{self.port}"

    def wait(self, about: str = "") -> None:
        """Wait until it answers. A line on standard error tells of it, with something ``about`` it.

        Raises ServerNotStarted with its last lines if it ends.
        """
        began = time.monotonic()
        _say(f"starting a server on {self.url}{about} … ")
        try:
            self._wait_until(began + _START_S)
        except BaseException:
            _say("\n")
            self.end()
            raise
        _say(f"ready after {time.monotonic() - began:.1f} s\n")

    def _wait_until(self, deadline: float) -> None:
        tries = 2  # somebody may take the port before the server does
        while self.process.poll() is not None or not _is_ready(self.port):
            if self.process.poll() is not None:
                tries -= 1
                words = self._last_words()
                if tries == 0 or _TAKEN not in words:
                    raise ServerNotStarted(f"it ended with status {self.process.returncode}:\n{words}")
                self._start()
            if time.monotonic() > deadline:
                raise ServerNotStarted(f"it did not answer within {_START_S:.0f} s:\n{self._last_words()}")
            time.sleep(_LOOK_S)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return "\n".join(lines[-_LAST_LINES:]) or "(it has written nothing)"

    def leave(self) -> None:
        """Let it outlive this program."""
        self.process.returncode = 0  # nobody waits for it

    def end(self) -> None:
        """End it, and wait until it has ended. In a fork of the process that started it, do nothing."""
        end(self.process, self._log, self._owner)

    def end_with_this(self) -> None:
        """End it when this object is forgotten, and at the end of the program."""
        finalize(self, end, self.process, self._log, self._owner)


def end(process: "subprocess.Popen[bytes]", log: IO[bytes], owner: int) -> None:
    """End a server, unless this is a copy of the process that started it, as a fork makes them."""
    if os.getpid() != owner:
        return
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        process.kill()
        process.wait()
    log.close()


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _is_ready(port: int) -> bool:
    connection = HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()

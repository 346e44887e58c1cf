"""Servers in processes of their own, each on the cores that it is given."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
START_SECONDS = 180
STOP_SECONDS = 20
REST_SECONDS = 20
_LOOK_SECONDS, _AT_REST = 0.1, 0.2
"""Over which time it is looked whether a server rests, and the share of it that it may compute then."""


class ServerError(RuntimeError):
    """A server did not start, died, or gave a wrong answer."""


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    port: int
    process: "subprocess.Popen[bytes]"

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self.port}"

    def family(self) -> list[psutil.Process]:
        """It and its children."""
        head = psutil.Process(self.process.pid)
        return [head, *head.children(recursive=True)]

    def peak_bytes(self) -> int:
        """Most bytes that were resident, summed over its processes (``VmHWM``)."""
        lines = [line for one in self.family() for line in Path(f"/proc/{one.pid}/status").read_text().splitlines()]
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

    def processor_seconds(self) -> float:
        """Seconds that its processes have computed: what other programs on the machine change least."""
        return sum(sum(one.cpu_times()[:2]) for one in self.family())

    def rest(self) -> None:
        """Wait until it computes next to nothing, so that the next one has the core for itself.

        When the load generator ends, requests of every connection are on their way; a server may answer them all, and
        some take a second to.
        """
        deadline = time.monotonic() + REST_SECONDS
        while time.monotonic() < deadline:
            before = self.processor_seconds()
            time.sleep(_LOOK_SECONDS)
            if self.processor_seconds() - before <= _AT_REST * _LOOK_SECONDS:
                return


def cores_for(count: int) -> tuple[list[int], list[int]]:
    """Return the cores of a server and those of the load generator; the same if there are too few."""
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    server = mine[:count]
    return server, mine[count : count + 1] or (mine if len(server) > 1 else server)


def pinned(command: Sequence[str], cores: Sequence[int]) -> list[str]:
    """The command, kept to these cores where the system can."""
    if shutil.which("taskset") is None:
        return list(command)
    return ["taskset", "-c", ",".join(map(str, cores)), *command]


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def surroundings() -> dict[str, str]:
    """The variables of a server: ours, without settings of the service and of threads, so that defaults hold."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ATTENTION_", "OMP_", "MKL_"))}
    return kept | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


@contextmanager
def running(
    command: Sequence[str], port: int, ready: str, cores: Sequence[int], environment: dict[str, str], log: Path,
    start_s: float = START_SECONDS,
) -> Iterator[Running]:  # fmt: skip
    """Start a server, wait until it answers at the path ``ready``, stop it at the end with all its children."""
    with log.open("ab") as sink:
        process = subprocess.Popen(
            pinned(command, cores), env=surroundings() | environment, stdin=subprocess.DEVNULL,
            stdout=sink, stderr=subprocess.STDOUT, cwd=log.parent, start_new_session=True,
        )  # fmt: skip
    try:
        _wait(process, port, ready, log, start_s)
        yield Running(port, process)
    finally:
        _stop(process)


def _wait(process: "subprocess.Popen[bytes]", port: int, ready: str, log: Path, start_s: float) -> None:
    deadline = time.monotonic() + start_s
    while process.poll() is None and time.monotonic() < deadline:
        connection = HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", ready)
            if connection.getresponse().status == 200:
                return
        except (OSError, HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    last = log.read_text(errors="replace").strip().splitlines()[-3:]
    fate = "did not answer in time" if process.poll() is None else f"ended with status {process.returncode}"
    raise ServerError(f"{fate}: {' / '.join(last)}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    family = [psutil.Process(process.pid)] if process.poll() is None else []
    family += [child for parent in family for child in parent.children(recursive=True)]
    process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(family, STOP_SECONDS)
    for left in alive:
        left.kill()
    process.wait()

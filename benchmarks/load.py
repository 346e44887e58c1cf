"""Load: prepared requests in turn on several connections, by ``wrk`` or, without it, by our own sockets."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.forms import Request
from benchmarks.processes import ROOT, pinned

SCRIPT = Path(__file__).parent / "post.lua"


@dataclass(frozen=True)
class Load:
    """Results of one run of the load generator."""

    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    failed: int
    """Requests that got no answer, or one other than 200."""
    processor_seconds: float = 0
    """Processor time of the server during the run."""

    @property
    def rate(self) -> float:
        """Requests a second that were answered."""
        return (self.requests - self.failed) / self.seconds


def generator() -> str:
    """Return the name of the load generator on this machine."""
    return "wrk" if shutil.which("wrk") else "the project's own loop over sockets (wrk is not installed)"


def send(
    url: str, requests: Sequence[Request], connections: int, seconds: float, cores: Sequence[int], folder: Path
) -> Load:
    """POST the requests in turn for this many seconds."""
    if shutil.which("wrk"):
        # wrk knows whole seconds only.
        command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "30s"]
        command += ["-s", str(SCRIPT), url]
    else:
        command = [sys.executable, "-m", "benchmarks.sockets", url, str(connections), str(seconds)]
    environment = os.environ | {"REQUESTS": str(_written(requests, folder / "requests"))}
    finished = subprocess.run(
        pinned(command, cores), env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if finished.returncode:
        raise RuntimeError(f"{command[0]} failed: {finished.stderr.strip() or finished.stdout.strip()}")
    return Load(**json.loads(finished.stdout.strip().splitlines()[-1]))


def _written(requests: Sequence[Request], file: Path) -> Path:
    """The file of these requests, as ``post.lua`` describes it."""
    with file.open("wb") as out:
        for request in requests:
            headers = "".join(f"{name}: {value}\n" for name, value in request.headers.items()).encode()
            out.write(b"%d %d\n" % (len(headers), len(request.body)) + headers + request.body)
    return file

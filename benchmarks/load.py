"""Load: one prepared request, over and over on so many connections, by ``wrk`` or, where it is missing, by sockets."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    url: str, body: Path, headers: Mapping[str, str], connections: int, seconds: float, cores: Sequence[int]
) -> Load:
    """Send the file as the body of POST requests for so many seconds."""
    if shutil.which("wrk"):
        # wrk knows whole seconds only.
        command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "30s"]
        command += ["-s", str(SCRIPT), url]
    else:
        command = [sys.executable, "-m", "benchmarks.sockets", url, str(connections), str(seconds)]
    told = "".join(f"{name}: {value}\n" for name, value in headers.items())
    environment = os.environ | {"BODY": str(body), "HEADERS": told}
    finished = subprocess.run(
        pinned(command, cores), env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if finished.returncode:
        raise RuntimeError(f"{command[0]} failed: {finished.stderr.strip() or finished.stdout.strip()}")
    return Load(**json.loads(finished.stdout.strip().splitlines()[-1]))

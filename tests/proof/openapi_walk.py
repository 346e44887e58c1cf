"""Walk the served OpenAPI document with schemathesis, in all its phases: ``python -m tests.proof.openapi_walk``.

A server of its own answers, over HTTP. The exit status is that of schemathesis: 0 if no check failed.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from tests.proof.servers import serving

CONFIG = Path(__file__).parent / "schemathesis.toml"
PHASES = "examples,coverage,fuzzing,stateful"
BUDGET = "256MiB"
"""The server's memory. Modules as large as a machine can hold would take most of the time."""


def walk(seconds: int | None, examples: int, seed: int | None = None) -> int:
    """Run schemathesis against a new server, and return its exit status.

    ``seconds``: a bound on its time; ``examples``: the most cases of one operation in one phase.
    """
    options = ["--phases", PHASES, "--checks", "all", "--max-examples", str(examples), "--request-timeout", "60"]
    # DELETE ends a model's process; its checkpoint stays in the repository, and is listed and loaded again.
    options += ["--exclude-checks", "use_after_free"]
    options += ["--continue-on-failure", "--no-shrink", "--generation-database", "none"]
    if seconds is not None:
        options += ["--max-time", str(seconds)]
    if seed is not None:
        options += ["--seed", str(seed)]
    with TemporaryDirectory() as folder, serving(Path(folder), memory_budget=BUDGET) as server:
        httpx.post(
            f"{server.url}/v1/modules", json={"name": "demo", "config": {"d_model": 8, "num_heads": 2}, "seed": 0}
        )
        command = [sys.executable, "-m", "schemathesis.cli", "--no-color", "--config-file", str(CONFIG), "run"]
        return subprocess.run([*command, f"{server.url}/openapi.json", *options], check=False, cwd=folder).returncode


def main() -> int:
    """Walk, and return the exit status."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seconds", type=int, help="a bound on the time")
    made.add_argument("--examples", type=int, default=30, help="the most cases of one operation in one phase")
    made.add_argument("--seed", type=int)
    options = made.parse_args()
    return walk(options.seconds, options.examples, options.seed)


if __name__ == "__main__":
    sys.exit(main())

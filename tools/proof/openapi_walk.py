"""Walk the served OpenAPI document with schemathesis, in all its phases: ``python -m tools.proof.openapi_walk``.

A server of its own answers, over HTTP. The exit status is that of schemathesis: 0 if no check failed.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from tools.proof.servers import serving

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
        whole = [*command, f"{server.url}/openapi.json", *options]
        ended = subprocess.run(whole, check=False, cwd=folder, stdout=subprocess.PIPE, text=True)
    print(ended.stdout)
    return 0 if ended.returncode == 1 and only_drew_nothing(ended.stdout) else ended.returncode


def only_drew_nothing(report: str) -> bool:
    """True if no check failed, and every error is one of schemathesis's own: it drew no array for a schema.

    Its generator of arrays gives up for a few seeds (``_repeated`` of its 4.32), and tells an error of the document.
    """
    errors = re.findall(r"^  🚫 (.+): (\d+)$", report, re.MULTILINE)
    drew_nothing = len(re.findall(r"^Cannot generate an array with \d+ demanded elements$", report, re.MULTILINE))
    return "❌" not in report and "= FAILURES =" not in report and errors == [("Schema Error", str(drew_nothing))]


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

"""The environment of the clients, and a run of their calls in it."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from tests.api.processes import process
from tests.api.test_every_variant import SPECS

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".cache" / "interop"
PYTHON = ENVIRONMENT / "bin" / "python"


def ask_by_clients() -> subprocess.CompletedProcess[str]:
    """Run every call of every client against a server of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        models, specs = Path(temporary) / "models", Path(temporary) / "specs.json"
        models.mkdir()
        specs.write_text(json.dumps(SPECS))
        with process(models, "--oip", "true", "--log-level", "error") as (_, url):
            folder = ROOT / "tools" / "interop"
            done = _run(folder / "calls.py", url, specs, ROOT / "docs" / "agents.md")
            types = _run(folder / "response_types.py", url)
            output, errors = done.stdout + types.stdout, done.stderr + types.stderr
            return subprocess.CompletedProcess(types.args, done.returncode or types.returncode, output, errors)


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "SSL_CERT_FILE"}}
    return subprocess.run([PYTHON, *command], capture_output=True, text=True, env=clean, timeout=600, check=False)

"""A server in a process of its own, whose log goes to a file: a pipe that nobody reads would stop it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.processes import Running, free_port, running

SETTINGS = {"ATTENTION_CALIBRATE": "false", "ATTENTION_LOG_FORMAT": "json", "OMP_NUM_THREADS": "1"}


@contextmanager
def serving(folder: Path, port: int = 0, **settings: object) -> Iterator[Running]:
    """Run a server until the block ends. Its models are in ``folder``, its log in ``folder/server-PORT.log``.

    ``settings``: by their names, as in ``max_queue=8``. ``port``: 0 for a free one.
    """
    port = port or free_port()
    models = folder / "models"
    models.mkdir(exist_ok=True)
    environment = SETTINGS | {f"ATTENTION_{name.upper()}": str(value) for name, value in settings.items()}
    environment |= {"ATTENTION_MODELS_DIR": str(models), "ATTENTION_PORT": str(port)}
    command = [sys.executable, "-m", "attention_service"]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    with running(command, port, "/health/ready", cores, environment, folder / f"server-{port}.log") as server:
        yield server

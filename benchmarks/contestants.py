"""Compared servers: this project's server, and bare servers as ceilings, with their commands and requests."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from attention_client import Client
from benchmarks import forms
from benchmarks.forms import JSON, SAFETENSORS, Form
from benchmarks.processes import Running, cores_for, free_port, running
from benchmarks.workloads import Workload

UNBATCHED = "bare ASGI, one at a time"
BATCHING = "bare ASGI, batching"
ORJSON = "bare ASGI, orjson"
OURS = "attention serve"


@dataclass(frozen=True)
class Setup:
    """Settings of a server's start."""

    workload: Workload
    weights: Path
    port: int
    folder: Path
    """For what it writes; kept from one start to the next of a run."""

    @property
    def threads(self) -> int:
        """One for each core of the server."""
        return self.workload.cores


def _nothing(url: str, workload: Workload) -> None:
    """Most servers need no more after their start."""


@dataclass(frozen=True)
class Server:
    """A program that serves the workload."""

    name: str
    command: Callable[[Setup], list[str]]
    ready: str
    """A path that is answered with 200 once the server can be asked."""
    prepare: Callable[[str, Workload], None] = _nothing
    environment: dict[str, str] = field(default_factory=dict)
    peer: bool = False
    """True for a server of another project. It runs only during its turn, because most peers compute while idle."""


@dataclass(frozen=True)
class Entry:
    """One row of the tables: a server, asked in one form."""

    name: str
    server: Server
    form: Form

    @property
    def label(self) -> str:
        """Name and form."""
        return f"{self.name}, {self.form.name}"


@contextmanager
def serving(server: Server, workload: Workload, folder: Path) -> Iterator[Running]:
    """The server, started on its cores and ready."""
    setup = Setup(workload, workload.save(folder), free_port(), folder)
    log = folder / f"{server.name.replace(' ', '-')}.log"
    cores, _ = cores_for(workload.cores)
    with running(server.command(setup), setup.port, server.ready, cores, server.environment, log) as process:
        server.prepare(process.url, workload)
        yield process


def _python(module: str) -> Callable[[Setup], list[str]]:
    def command(setup: Setup) -> list[str]:
        return [sys.executable, "-m", module, str(setup.weights), str(setup.port), str(setup.threads)]

    return command


def _attention(command: str, setup: Setup, *more: str) -> list[str]:
    models = setup.folder / f"models-{setup.workload.cores}"
    return [str(Path(sys.executable).with_name("attention")), command, "--models-dir", str(models), *more]


def create_module(url: str, workload: Workload) -> None:
    """Put the workload's weights into this project's server, as a module of its name."""
    parameters = {}
    for part in ("weight", "bias"):
        joint = workload.weights()[f"in_proj_{part}"]
        for at, role in enumerate("qkv"):
            parameters[f"{role}_proj.{part}"] = joint[at * workload.width : (at + 1) * workload.width]
        parameters[f"o_proj.{part}"] = workload.weights()[f"out_proj.{part}"]
    with Client(url) as client:
        client.modules.create(
            workload.name, {"d_model": workload.width, "num_heads": workload.heads}, parameters=parameters
        )


BARE = Server("bare ASGI", _python("benchmarks.servers.bare"), "/echo")
LISTS = Server("FastAPI, pydantic lists", _python("benchmarks.servers.lists"), "/docs")
SERVICE = Server(
    OURS,
    # What is learned from the runs would change the plans from round to round.
    lambda setup: _attention("serve", setup, "--port", str(setup.port), "--calibrate", "false"),
    "/health/ready",
    create_module,
)


def entries(module: str) -> list[Entry]:
    """Our server and the ceilings, for the workload of the name ``module``."""
    return [
        Entry(UNBATCHED, BARE, forms.raw("/raw")),
        Entry(BATCHING, BARE, forms.raw("/batched")),
        Entry(OURS, SERVICE, forms.ours(module, SAFETENSORS)),
        Entry(ORJSON, BARE, forms.json_lists("/json")),
        Entry(LISTS.name, LISTS, forms.json_lists("/forward")),
        Entry(OURS, SERVICE, forms.ours(module, JSON)),
    ]

"""Several processes behind HAProxy beside one without it, and what following the store costs.

``python -m benchmarks.replicas`` prints the tables; ``--output benchmarks/results/replicas.md`` writes them. It needs
HAProxy.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

from attention_contract.schemas.modules import CreateModule
from attention_contract.wire import SAFETENSORS
from attention_service.modules.library import Library
from attention_service.runtime.services.store_follower import FOLLOW_S
from benchmarks import forms
from benchmarks.contestants import create_module
from benchmarks.load import Load, generator, send
from benchmarks.page import fewer, parser, publish
from benchmarks.processes import ROOT, Running, free_port, running
from benchmarks.tables import short, table
from benchmarks.workloads import WORKLOADS, Workload

CONNECTIONS, SECONDS = 64, 3
MEASURED = WORKLOADS["W1"], WORKLOADS["W2"]
MODULES = 10, 100, 1000
REPLICAS = 10, 100, 1000
TEXT = """All on the same {cores} cores: the processes, HAProxy and the load generator ({generator}), {connections}
connections. Rates are medians of {rounds} rounds, in which all take turns; a ratio is the median of the rounds' ratios
to one process without HAProxy, with its least and largest beside it. `--calibrate false`.
"""


def _started(stack: ExitStack, n: int, folder: Path) -> Running:
    """One process (n = 0), or n of them behind HAProxy."""
    port, cores = free_port(), sorted(os.sched_getaffinity(0))
    environment = {
        "ATTENTION_PORT": str(port), "ATTENTION_MODELS_DIR": str(folder / f"models-{n}"),
        "FIRST_PORT": str(free_port()),
        "ATTENTION_CALIBRATE": "false", "ATTENTION_THREADS": "1", "ATTENTION_LOG_LEVEL": "warning",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin",
    }  # fmt: skip
    command = [str(ROOT / "deploy" / "scale" / "serve.sh"), str(n)] if n else ["attention", "serve"]
    return stack.enter_context(running(command, port, "/health/ready", cores, environment, folder / f"log-{n}"))


def rates(processes: tuple[int, ...], rounds: int, folder: Path) -> Iterator[str]:
    """The rates of small and larger forward requests."""
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        servers = {n: _started(stack, n, folder) for n in (0, *processes)}
        time.sleep(2)  # in which HAProxy finds the last process
        for server in servers.values():
            for workload in MEASURED:
                create_module(server.url, workload)
        for workload in MEASURED:
            found = _found(servers, workload, rounds, cores, folder)
            yield f"## {workload.name}: {workload.text}\n"
            yield table(
                ["processes", "requests/s", "of one process", "p50, ms", "p99, ms", "failed"],
                (
                    [
                        f"{n} behind HAProxy" if n else "1 alone",
                        f"{median(load.rate for load in loads):,.0f}",
                        _ratio([load.rate / alone.rate for load, alone in zip(loads, found[0], strict=True)]),
                        short(median(load.p50_ms for load in loads)),
                        short(median(load.p99_ms for load in loads)),
                        str(sum(load.failed for load in loads)),
                    ]
                    for n, loads in found.items()
                ),
            )
            yield ""


def _found(
    servers: dict[int, Running], workload: Workload, rounds: int, cores: list[int], folder: Path
) -> dict[int, list[Load]]:
    """The measured runs of each number of processes, in turn; the first run of each warms it up."""
    request = forms.ours(workload.name, SAFETENSORS).write(workload.query())
    found: dict[int, list[Load]] = {n: [] for n in servers}
    for warm in (True, *[False] * rounds):
        for n, server in servers.items():
            load = send(server.url + request.path, [request], CONNECTIONS, 1 if warm else SECONDS, cores, folder)
            server.rest()
            if not warm:
                found[n].append(load)
    return found


def _ratio(ratios: list[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def looks(folder: Path) -> Iterator[str]:
    """The cost of a look at the store in which nothing changed, by the number of modules and of processes."""
    rows = []
    for count in MODULES:
        library = Library(folder / f"store-{count}", torch.device("cpu"))
        for index in range(count):
            library.create(CreateModule.model_validate({"name": f"m{index}", "config": {"d_model": 4, "num_heads": 1}}))
        library.refresh()
        library.follow()
        took = []
        for _ in range(20):
            started = time.process_time()
            library.follow()
            took.append(time.process_time() - started)
        seconds = float(np.median(took))
        rows.append([str(count), short(seconds * 1e3), *(f"{n * count / FOLLOW_S:,.0f}" for n in REPLICAS),
                     *(f"{n * seconds / FOLLOW_S:.2f}" for n in REPLICAS)])  # fmt: skip
    yield "## Following the store\n"
    yield f"Each process looks every {FOLLOW_S} s and reads the status of each module's `config.json`.\n"
    head = ["modules", "one look, ms of processor"]
    head += [f"status reads/s of {n} processes" for n in REPLICAS] + [f"cores of {n} processes" for n in REPLICAS]
    yield table(head, rows)


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, 7)
    options.add_argument("--processes", type=int, nargs="+", default=(1, 2), help="behind HAProxy")
    arguments = options.parse_args()
    rounds = arguments.rounds or (fewer(7) if arguments.quick else 7)
    text = TEXT.format(
        cores=len(os.sched_getaffinity(0)), generator=generator(), connections=CONNECTIONS, rounds=rounds
    )
    with TemporaryDirectory() as folder:
        lines = chain(rates(tuple(arguments.processes), rounds, Path(folder)), looks(Path(folder)))
        publish("Several processes", text, lines, arguments.output)


if __name__ == "__main__":
    main()

"""Overload: answers while more callers ask, each again at once, than may wait for the device.

``python -m benchmarks.overload`` prints the table; ``--output benchmarks/results/overload.md`` writes it.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from attention_contract.wire import SAFETENSORS
from benchmarks import forms
from benchmarks.contestants import SERVICE, serving
from benchmarks.demanding import Demand
from benchmarks.holding import PING, Connection
from benchmarks.load import generator, send
from benchmarks.page import parser, publish
from benchmarks.processes import Running, cores_for
from benchmarks.tables import short, table
from benchmarks.workloads import WORKLOADS

WORKLOAD = WORKLOADS["W1"]
REQUEST = forms.ours(WORKLOAD.name, SAFETENSORS).write(WORKLOAD.query())
FORWARD = Demand("one caller more", "POST", REQUEST.path, REQUEST.body, REQUEST.headers)
CONNECTIONS = (64, 250, 300, 512, 600)
SECONDS = 3
WARM_UP_S = 1
PAUSE_S = 0.01
"""Between an answer and the next request of each caller who is timed."""


@dataclass(frozen=True)
class Found:
    """Figures of one run."""

    answers: float
    """Answers with 200 a second."""
    refusals: float
    """Other answers a second."""
    admitted_ms: float
    """The 99th percentile of the answers with 200, of one caller beside the load."""
    health_ms: float
    """The slowest answer of /health/live meanwhile."""
    processor: float
    """Share of its core that the server used."""


async def overload(server: Running, connections: int, seconds: float, folder: Path) -> Found:
    """Ask on so many connections, and time two callers beside them."""
    _, cores = cores_for(WORKLOAD.cores)
    times: dict[str, list[float]] = {PING.name: [], FORWARD.name: []}

    async def ask(demand: Demand) -> None:
        connection = Connection(server.port)
        try:
            while True:
                started = time.perf_counter()
                if await connection.ask(demand) == HTTPStatus.OK:
                    times[demand.name].append((time.perf_counter() - started) * 1e3)
                await asyncio.sleep(PAUSE_S)
        finally:
            await connection.close()

    url, used = server.url + REQUEST.path, server.processor_seconds()
    callers = [asyncio.create_task(ask(demand)) for demand in (PING, FORWARD)]
    load = await asyncio.to_thread(send, url, [REQUEST], connections, seconds, cores, folder)
    used = server.processor_seconds() - used
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    admitted = float(np.percentile(times[FORWARD.name], 99)) if times[FORWARD.name] else float("nan")
    health = max(times[PING.name], default=float("nan"))
    return Found(load.rate, load.failed / load.seconds, admitted, health, used / load.seconds)


def lines(server: Running, rounds: int, connections: tuple[int, ...], folder: Path) -> Iterator[str]:
    """The table: of each number of connections the medians of the rounds, in which all take turns."""
    asyncio.run(overload(server, 64, WARM_UP_S, folder))
    found: dict[int, list[Found]] = {count: [] for count in connections}
    for _ in range(rounds):
        for count in connections:
            found[count].append(asyncio.run(overload(server, count, SECONDS, folder)))
            server.rest()
    middle = {
        count: [median(getattr(one, name) for one in runs) for name in Found.__dataclass_fields__]
        for count, runs in found.items()
    }
    peak = max(answers for answers, *_ in middle.values())
    head = ["connections", "answers/s", "of the peak", "refusals/s", "admitted p99, ms", "slowest health, ms", "core"]
    yield table(
        head,
        (
            [str(count), f"{answers:,.0f}", f"{answers / peak:.2f}", f"{refusals:,.0f}", short(admitted),
             short(health), f"{processor:.2f}"]
            for count, (answers, refusals, admitted, health, processor) in middle.items()
        ),
    )  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, 3)
    options.add_argument("--connections", type=int, nargs="+", default=CONNECTIONS, help="of the load generator")
    arguments = options.parse_args()
    text = f"""One server on one core with its default settings: 256 requests may wait for the device. The load
generator ({generator()}) sends a forward request ({WORKLOAD.text}) on each connection, and the next one as soon as it
is answered or refused, for {SECONDS} s; medians of the rounds. One caller beside it asks for the same, and another for
`{PING.method} {PING.path}`, each {PAUSE_S * 1e3:.0f} ms after its last answer. They run on the core of the load
generator, so that their times include its own."""
    with TemporaryDirectory() as folder, serving(SERVICE, WORKLOAD, Path(folder)) as server:
        rounds = arguments.rounds or (1 if arguments.quick else 3)
        publish("Overload", text, lines(server, rounds, tuple(arguments.connections), Path(folder)), arguments.output)


if __name__ == "__main__":
    main()

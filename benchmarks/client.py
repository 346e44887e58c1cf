"""The clients: the cost of a call beside the same bytes sent by httpx itself, against a bare echo server.

``python -m benchmarks.client --rounds 3`` prints tables; ``--output FILE`` writes them.
"""

import asyncio
import gc
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import httpx

from attention_client import AsyncClient, Client
from attention_client.connection_settings import LIMITS
from attention_client.transport import AiohttpClient
from attention_contract.schemas.attention import ForwardRequest
from attention_contract.wire import SAFETENSORS, to_body
from benchmarks.page import fewer, parser, publish
from benchmarks.processes import cores_for, free_port, running
from benchmarks.tables import short, spread, table
from benchmarks.workloads import WORKLOADS, Workload

TEXT = """One call of `forward` over HTTP on loopback, against a bare ASGI server that answers with the query. Each has
a core. {rounds} rounds in which the clients take turns; medians with the least and the largest, and medians of the
ratios within a round. Processor time is the client's alone; other work on the machine moves it less.

`Client` and `AsyncClient` make the request from an array, validate it, and make arrays of the reply; httpx sends bytes
prepared once and reads bytes. `httpx over aiohttp` has the same connections as `AsyncClient`."""
PATH = "/v1/modules/echo/forward"


@dataclass
class Timed:
    """One client: a call, and its times in each round."""

    name: str
    call: Callable[[], object]
    rates: list[float] = field(default_factory=list)
    """Calls a second."""
    busy: list[float] = field(default_factory=list)
    """Seconds of processor time a call, of this process, the kernel's included."""

    def add(self, calls: int, seconds: float, busy: float) -> None:
        """Note one round."""
        self.rates.append(calls / seconds)
        self.busy.append(busy / calls)


def main() -> None:
    """Measure, print, write."""
    made = parser(__doc__, 11)
    made.add_argument("--workload", help="of W1, W2, W3; default: all, with --quick W1")
    options = made.parse_args()
    rounds = options.rounds or (fewer(11) if options.quick else 11)
    names = options.workload or ("W1" if options.quick else ",".join(WORKLOADS))
    lines = (line for name in names.split(",") for line in sections(WORKLOADS[name], rounds))
    publish("Clients", TEXT.format(rounds=rounds), lines, options.output, ("httpx", "aiohttp", "uvicorn"))


def sections(workload: Workload, rounds: int) -> Iterator[str]:
    """Yield the tables of one workload."""
    server, client = cores_for(1)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        port = free_port()
        weights = workload.save(Path(folder))
        command = [sys.executable, "-m", "benchmarks.servers.echo", str(weights), str(port), "1"]
        stack.enter_context(running(command, port, "/", server, {}, Path(folder) / "log"))
        if hasattr(os, "sched_setaffinity"):
            stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            os.sched_setaffinity(0, client)
        gc.freeze()
        url, calls = f"http://127.0.0.1:{port}", {"W1": 128, "W2": 32}.get(workload.name, 2)
        yield _section(f"{workload.name} ({workload.text}), blocking", blocking(workload, url, rounds, calls))
        for at_once in workload.concurrency:
            found = asyncio.run(awaited(workload, url, rounds, 4 * max(calls, at_once), at_once))
            yield _section(f"{workload.name}, awaited, {at_once} at once", found)


def _section(title: str, found: list[Timed]) -> str:
    base = found[0]
    rows = [
        (
            one.name,
            short(1e6 / median(one.rates)),
            spread(one.rates),
            short(median(b / a for a, b in zip(one.rates, base.rates, strict=True))),
            short(1e6 * median(one.busy)),
            short(median(a / b for a, b in zip(one.busy, base.busy, strict=True))),
        )
        for one in found
    ]
    head = ["client", "µs a call", "calls a second", f"over {base.name}", "µs of processor", f"over {base.name}"]
    return f"## {title}\n\n{table(head, rows)}\n"


def _body(workload: Workload) -> bytes:
    return b"".join(to_body(ForwardRequest(query=workload.query()), SAFETENSORS, "request"))


def _settings(url: str) -> dict[str, object]:
    headers = {"content-type": SAFETENSORS, "accept": SAFETENSORS}
    return {"base_url": url, "headers": headers, "limits": LIMITS, "timeout": 60}


def blocking(workload: Workload, url: str, rounds: int, calls: int) -> list[Timed]:
    """Time the blocking clients, one call after the other."""
    query, body = workload.query(), _body(workload)
    with httpx.Client(**_settings(url)) as http, Client(url) as ours:  # type: ignore[arg-type]
        assert (ours.forward("echo", query).output == query).all()
        contestants = [
            Timed("httpx.Client", lambda: http.post(PATH, content=body)),
            Timed("Client", lambda: ours.forward("echo", query)),
        ]
        for turn in range(rounds + 1):
            for one in contestants[:: 1 if turn % 2 else -1]:
                started, busy = time.perf_counter(), time.process_time()
                for _ in range(calls):
                    one.call()
                if turn:  # the first warms up
                    one.add(calls, time.perf_counter() - started, time.process_time() - busy)
        return contestants


async def awaited(workload: Workload, url: str, rounds: int, calls: int, at_once: int) -> list[Timed]:
    """Time the awaited clients, so many calls at once."""
    query, body = workload.query(), _body(workload)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(**_settings(url)))  # type: ignore[arg-type]
        over_aiohttp = await stack.enter_async_context(AiohttpClient(**_settings(url)))  # type: ignore[arg-type]
        ours = await stack.enter_async_context(AsyncClient(url))
        assert ((await ours.forward("echo", query)).output == query).all()
        contestants = [
            Timed("httpx over aiohttp", lambda: over_aiohttp.post(PATH, content=body)),
            Timed("AsyncClient", lambda: ours.forward("echo", query)),
            Timed("httpx.AsyncClient", lambda: http.post(PATH, content=body)),
        ]
        for turn in range(rounds + 1):
            for one in contestants[:: 1 if turn % 2 else -1]:
                started, busy = time.perf_counter(), time.process_time()
                await asyncio.gather(*[_some(one.call, calls // at_once) for _ in range(at_once)])
                if turn:  # the first warms up
                    made = calls // at_once * at_once
                    one.add(made, time.perf_counter() - started, time.process_time() - busy)
        return contestants


async def _some(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        made = call()
        assert isinstance(made, Awaitable)
        await made


if __name__ == "__main__":
    main()

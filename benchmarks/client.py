"""The clients: what a call costs beside the same bytes sent by other libraries, against a bare server.

``python -m benchmarks.client --rounds 3`` prints tables; ``--output FILE`` writes them. ``aiohttp`` and
``pycurl`` take part where they are installed.
"""

import asyncio
import gc
import io
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpcore
import httpx
import numpy as np

from attention_client import AsyncClient, Client
from attention_contract.schemas.attention import ForwardReply, ForwardRequest
from attention_contract.wire import SAFETENSORS, to_body
from benchmarks.page import fewer, parser, publish
from benchmarks.processes import cores_for, free_port, running
from benchmarks.tables import short, spread, table
from benchmarks.workloads import WORKLOADS, Workload

TEXT = """One call of `forward` over HTTP on loopback, against a bare ASGI server (no validation, one request at a time;
at more than one call at once: together what arrived in one turn of its event loop) that computes the attention. Server
and client have a core each. {rounds} rounds in which the clients take turns; medians with the least and the largest,
and medians of the ratios within a round. Processor time is the client's alone, and moves less where a machine has other
things to do.

`Client` and `AsyncClient` make the request from an array, validate it, and make arrays of the reply; the others send
bytes prepared once and read bytes. `through httpx` is ours over httpx's own connections."""
HEADERS = {"content-type": SAFETENSORS, "accept": SAFETENSORS}
PATH = "/v1/modules/{}/forward"


@dataclass
class Timed:
    """One client: a call, and what it took in each round."""

    name: str
    call: Callable[[], object]
    rates: list[float] = field(default_factory=list)
    """Calls a second."""
    busy: list[float] = field(default_factory=list)
    """Seconds of processor time a call, of this process, the kernel's included."""


def main() -> None:
    """Measure, print, write."""
    made = parser(__doc__, 11)
    made.add_argument("--workload", help="of W1, W2, W3; default: all, with --quick W1")
    options = made.parse_args()
    rounds = options.rounds or (fewer(11) if options.quick else 11)
    names = options.workload or ("W1" if options.quick else ",".join(WORKLOADS))
    lines = (line for name in names.split(",") for line in sections(WORKLOADS[name], rounds))
    publish("Clients", TEXT.format(rounds=rounds), lines, options.output, ("httpx", "httptools", "uvicorn"))


def sections(workload: Workload, rounds: int) -> Iterator[str]:
    """The tables of one workload."""
    server, client = cores_for(1)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        port = free_port()
        weights = workload.save(Path(folder))
        command = [sys.executable, "-m", "benchmarks.servers.speaking", str(weights), str(port), "1"]
        stack.enter_context(running(command, port, "/", server, {}, Path(folder) / "log"))
        if hasattr(os, "sched_setaffinity"):
            stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            os.sched_setaffinity(0, client)
        gc.freeze()
        url, calls = f"http://127.0.0.1:{port}", {"W1": 128, "W2": 32}.get(workload.name, 2)
        yield _told(f"{workload.name} ({workload.text}), blocking", blocking(workload, url, rounds, calls))
        for at_once in workload.concurrency:
            found = asyncio.run(awaited(workload, url, rounds, 4 * max(calls, at_once), at_once))
            yield _told(f"{workload.name}, awaited, {at_once} at once", found)


def _told(title: str, found: list[Timed]) -> str:
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


def check(reply: ForwardReply, workload: Workload) -> None:
    """Raise AssertionError unless the reply holds what attention gives."""
    assert reply.output is not None
    assert np.allclose(reply.output, workload.answer(workload.query()), atol=1e-3)


# ── blocking ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def blocking(workload: Workload, url: str, rounds: int, calls: int) -> list[Timed]:
    """Every blocking client, one call after the other."""
    query = workload.query()
    body = b"".join(to_body(ForwardRequest(query=query), SAFETENSORS, "request"))
    path = PATH.format("one")
    with ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=url, headers=HEADERS))
        core = stack.enter_context(httpcore.ConnectionPool())
        longer = stack.enter_context(Client(url, transport=httpx.HTTPTransport()))
        ours = stack.enter_context(Client(url))
        check(ours.forward("one", query), workload)
        contestants = [
            Timed("bare socket", stack.enter_context(Bare(url, path, body)).call),
            *([Timed("pycurl", _curl(url + path, body))] if find_spec("pycurl") else []),
            Timed("httpcore", lambda: core.request("POST", url + path, headers=list(HEADERS.items()), content=body)),
            Timed("httpx.Client", lambda: http.post(path, content=body)),
            Timed("Client through httpx", lambda: longer.forward("one", query)),
            Timed("Client", lambda: ours.forward("one", query)),
        ]
        for turn in range(rounds + 1):
            for one in contestants[:: 1 if turn % 2 else -1]:
                started, busy = time.perf_counter(), time.process_time()
                for _ in range(calls):
                    one.call()
                if turn:  # the first warms up
                    one.rates.append(calls / (time.perf_counter() - started))
                    one.busy.append((time.process_time() - busy) / calls)
        return contestants


class Bare:
    """A socket that sends prepared bytes and reads as many as are announced."""

    def __init__(self, url: str, path: str, body: bytes) -> None:
        parts = httpx.URL(url)
        lines = [f"POST {path} HTTP/1.1", f"host: {parts.host}", f"content-length: {len(body)}"]
        self.request = "\r\n".join([*lines, "", ""]).encode() + body
        self.socket = socket.create_connection((parts.host, parts.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.room = memoryview(bytearray(len(body) + 2**16))

    def call(self) -> None:
        """Ask once."""
        self.socket.sendall(self.request)
        filled = self.socket.recv_into(self.room)  # a loopback gives the whole head at once
        head, _, _ = bytes(self.room[:filled]).partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        while filled < len(head) + 4 + length:
            filled += self.socket.recv_into(self.room[filled:])

    def __enter__(self) -> "Bare":
        return self

    def __exit__(self, *fault: object) -> None:
        self.socket.close()


def _curl(url: str, body: bytes) -> Callable[[], object]:
    pycurl = import_module("pycurl")

    curl = pycurl.Curl()
    curl.setopt(pycurl.URL, url)
    curl.setopt(pycurl.HTTPHEADER, [*(f"{name}: {value}" for name, value in HEADERS.items()), "expect:"])

    def call() -> bytes:
        received = io.BytesIO()
        curl.setopt(pycurl.POSTFIELDS, body)
        curl.setopt(pycurl.WRITEFUNCTION, received.write)
        curl.perform()
        return received.getvalue()

    return call


# ── awaited ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def awaited(workload: Workload, url: str, rounds: int, calls: int, at_once: int) -> list[Timed]:
    """Every awaited client, so many calls at once."""
    query = workload.query()
    body = b"".join(to_body(ForwardRequest(query=query), SAFETENSORS, "request"))
    name = "one" if at_once == 1 else "many"
    path = PATH.format(name)
    limits = httpx.Limits(max_connections=100, max_keepalive_connections=100)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, headers=HEADERS, limits=limits))
        transport = httpx.AsyncHTTPTransport(limits=limits)
        longer = await stack.enter_async_context(AsyncClient(url, transport=transport))
        ours = await stack.enter_async_context(AsyncClient(url))
        check(await ours.forward(name, query), workload)
        contestants = [
            Timed("httpx.AsyncClient", lambda: http.post(path, content=body)),
            *[Timed("aiohttp", call) async for call in _aiohttp(stack, url + path, body)],
            Timed("AsyncClient through httpx", lambda: longer.forward(name, query)),
            Timed("AsyncClient", lambda: ours.forward(name, query)),
        ]
        for turn in range(rounds + 1):
            for one in contestants[:: 1 if turn % 2 else -1]:
                busy, made = time.process_time(), calls // at_once * at_once
                seconds = await _together(one.call, calls, at_once)
                if turn:  # the first warms up
                    one.rates.append(made / seconds)
                    one.busy.append((time.process_time() - busy) / made)
        return contestants


async def _aiohttp(stack: AsyncExitStack, url: str, body: bytes) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """A call by aiohttp, where it is installed."""
    if find_spec("aiohttp") is None:
        return
    aiohttp = import_module("aiohttp")
    session = await stack.enter_async_context(aiohttp.ClientSession())

    async def call() -> bytes:
        async with session.post(url, data=body, headers=HEADERS) as response:
            return bytes(await response.read())

    yield call


async def _together(call: Callable[[], Any], calls: int, at_once: int) -> float:
    """The seconds that so many calls take."""

    async def some() -> None:
        for _ in range(calls // at_once):
            await call()

    started = time.perf_counter()
    await asyncio.gather(*[some() for _ in range(at_once)])
    return time.perf_counter() - started


if __name__ == "__main__":
    main()

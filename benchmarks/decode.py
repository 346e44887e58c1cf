"""Decode sessions over HTTP: tokens a second on one core, memory, a long past, and idle sessions beside.

``python -m benchmarks.decode --rounds 3`` prints tables; ``--output FILE`` writes them. The kernel alone is measured by
``benchmarks.decode_kernels``.
"""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import torch
from websockets.asyncio.client import ClientConnection, connect

from attention_client import Client
from attention_contract.frames import to_frame
from attention_contract.schemas.modules import CreateModule
from attention_contract.schemas.sessions import OpenSession, ReplaceCache, SessionStep, StepRequest, StepsRequest
from attention_contract.validation import validate
from attention_contract.wire import SAFETENSORS, to_body
from attention_service.core.kv_cache.slab import PAGE_TOKENS
from attention_service.engine import Engine
from attention_service.engine_settings import EngineSettings
from attention_service.runtime.device.torch_device import Device
from benchmarks.decode_peers import Peer, peers
from benchmarks.page import fewer, parser, publish
from benchmarks.processes import Running, cores_for, free_port, running
from benchmarks.sockets import HEAD_END
from benchmarks.tables import short, spread, table

WIDTH, HEADS, SESSIONS, PAST = 384, 12, 16, 512
CONFIG = {"d_model": WIDTH, "num_heads": HEADS, "spec": {"masks": [{"name": "causal"}]}}
TOKEN_BYTES = 2 * WIDTH * 4
"""Bytes of the keys and values of one token."""
STEPS = 64
"""Steps of each session in a round."""
LONG = 100_000
IDLE = 1000
TEXT = """One layer of width {width}, {heads} heads, float32. {rounds} rounds in which the rows take turns; medians
with the least and the largest, ratios medians of those within a round.
"""
SERVED = """The server has one core, the load generator another. {sessions} sessions begin each round at {past} tokens,
and each gets {steps} more, one at a time. The load generator sends bodies that it made before and reads the replies
without decoding them. Transformers computes in one process on the server's core, while the server rests, with one
thread: a Llama of one layer of the same width and a vocabulary of 64, so that little but attention remains. Its tokens
are those after the first one; what the prompt takes is subtracted.
"""


# ── over HTTP ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Row:
    """One way to decode, and the tokens a second of each round."""

    name: str
    run: Callable[[], Awaitable[float]]
    """Run one round; the seconds that it took."""
    rates: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    """Processor seconds of the server for one token."""


class Caller:
    """One HTTP connection, kept open, that sends the same body again and again."""

    def __init__(self, port: int, path: str, body: bytes) -> None:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {SAFETENSORS}\r\naccept: {SAFETENSORS}\r\n"
        self._port = port
        self._message = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    async def repeat(self, times: int) -> None:
        """Ask and read the reply, so many times."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        for _ in range(times):
            writer.write(self._message)
            head = await reader.readuntil(HEAD_END)
            length = next(
                int(line.partition(b":")[2])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length")
            )
            body = await reader.readexactly(length)
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(body[:500])
        writer.close()
        await writer.wait_closed()


async def streamed(connection: ClientConnection, frames: Sequence[bytes | str], times: int) -> None:
    """Send each frame again as soon as one reply is there. Replies of equal sessions come in order."""
    for frame in frames:
        await connection.send(frame)
    left = (times - 1) * len(frames)
    for index in range(times * len(frames)):
        reply = await connection.recv()
        if isinstance(reply, str) or b'"code"' in reply[:200]:
            raise RuntimeError(reply[:500])
        if index < left:
            await connection.send(frames[index % len(frames)])


async def tokens_a_second(server: Running, rounds: int, others: Sequence[Peer]) -> list[Row]:
    """Measure every way to decode, in turn."""
    query = np.random.default_rng(0).standard_normal((1, WIDTH)).astype(np.float32)
    with Client(server.url) as client:
        past = np.random.default_rng(1).standard_normal((PAST, WIDTH)).astype(np.float32)
        ids = [client.sessions.open("layer").id for _ in range(SESSIONS)]
        for each in ids:
            client.sessions.step(each, past)
        steps = [SessionStep(session=each, query=query) for each in ids]
        many = StepsRequest(steps=steps)
        single = b"".join(to_body(StepRequest(query=query), SAFETENSORS, "request"))
        callers = [Caller(server.port, f"/v1/sessions/{each}/step", single) for each in ids]
        together = Caller(server.port, "/v1/sessions/step", b"".join(to_body(many, SAFETENSORS, "request")))
        async with AsyncExitStack() as stack:
            url = f"ws://127.0.0.1:{server.port}/v1/sessions/stream"
            stream = await stack.enter_async_context(connect(url, compression=None, max_size=None))
            frames = [to_frame(step, text=False, entry="request") for step in steps]
            whole = [to_frame(many, text=False, entry="request")]

            async def singly() -> None:
                await asyncio.gather(*(caller.repeat(STEPS) for caller in callers))

            rows = [
                Row(f"a request a step, {SESSIONS} at once", timed(singly)),
                Row(f"a request for {SESSIONS} steps", timed(lambda: together.repeat(STEPS))),
                Row("stream, a message a step", timed(lambda: streamed(stream, frames, STEPS))),
                Row(f"stream, a message for {SESSIONS} steps", timed(lambda: streamed(stream, whole, STEPS))),
                *(Row(peer.name, peer.seconds) for peer in others),
            ]
            for turn in range(rounds + 1):
                for row in rows:
                    before = server.processor_seconds()
                    seconds = await row.run()
                    if turn:  # the first warms up
                        row.rates.append(SESSIONS * STEPS / seconds)
                        row.busy.append((server.processor_seconds() - before) / SESSIONS / STEPS)
                    for each in ids:
                        client.sessions.truncate(each, PAST)
    return rows


def timed(work: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[float]]:
    """The same, which tells its seconds."""

    async def run() -> float:
        started = time.perf_counter()
        await work()
        return time.perf_counter() - started

    return run


def served(folder: Path, rounds: int, *, quick: bool) -> Iterator[str]:
    """Yield the table of tokens a second, and that of the memory of the server."""
    core, mine = cores_for(1)
    port = free_port()
    command = [sys.executable, "-m", "attention_service", "--port", str(port), "--calibrate", "false"]
    with ExitStack() as stack:
        environment = {"ATTENTION_MODELS_DIR": str(folder), "OMP_NUM_THREADS": "1"}
        server = stack.enter_context(running(command, port, "/health/ready", core, environment, folder / "log"))
        with Client(server.url) as client:
            client.modules.create("layer", CONFIG, seed=0)
        others = [] if quick else [on(core, peer) for peer in peers(WIDTH, HEADS, SESSIONS, PAST, STEPS)]
        if hasattr(os, "sched_setaffinity"):
            stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            os.sched_setaffinity(0, mine)
        rows = asyncio.run(tokens_a_second(server, rounds, others))
        yield f"## Tokens a second\n\n{SERVED.format(sessions=SESSIONS, past=PAST, steps=STEPS)}\n{_rates(rows)}\n"
        yield f"## Memory\n\n{_memory(server)}\n"


def on(cores: Sequence[int], peer: Peer) -> Peer:
    """The same on other cores: threads have the affinity of their own."""

    async def seconds() -> float:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
        try:
            return await peer.seconds()
        finally:
            os.sched_setaffinity(0, before)

    return Peer(peer.name, seconds) if hasattr(os, "sched_setaffinity") else peer


def _rates(rows: Sequence[Row]) -> str:
    first = rows[0]
    cells = [
        (
            row.name,
            spread(row.rates),
            short(median(a / b for a, b in zip(row.rates, first.rates, strict=True))),
            short(1e6 * median(row.busy)) if "transformers" not in row.name else "",
        )
        for row in rows
    ]
    return table(["", "tokens a second", "over the first row", "µs of the server's processor a token"], cells)


def _memory(server: Running) -> str:
    """Bytes of pages, and of resident memory, beside the bytes of keys and values."""
    rows = []
    with Client(server.url) as client:
        for sessions, tokens in [(1, 4096), (64, 1000), (256, 100)]:
            query = np.zeros((tokens, WIDTH), np.float32)
            before, pages = psutil.Process(server.process.pid).memory_info().rss, client.sessions.list().bytes
            opened = [client.sessions.open("layer").id for _ in range(sessions)]
            for each in opened:
                client.sessions.step(each, query)
            held, needed = client.sessions.list().bytes - pages, sessions * tokens * TOKEN_BYTES
            grown = psutil.Process(server.process.pid).memory_info().rss - before
            page = PAGE_TOKENS * TOKEN_BYTES
            rows.append((
                f"{sessions:,} × {tokens:,}", *(short(x / 2**20) for x in (needed, held, grown)),
                short(held / needed), short((held - sessions * page) / needed),
            ))  # fmt: skip
            for each in opened:
                client.sessions.delete(each)
    head = ["sessions × tokens", "keys and values, MiB", "pages, MiB", "resident memory grew by, MiB", "ratio of pages"]
    return table([*head, "without a page a session"], rows)


# ── in process ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def in_process(folder: Path, rounds: int) -> str:
    """A step over a long past, and one beside idle sessions; on one thread, without HTTP."""
    torch.set_num_threads(1)
    engines = [
        Engine(folder / name, Device.open("cpu"), EngineSettings(memory_budget=2**33)) for name in ("alone", "crowded")
    ]
    rng = np.random.default_rng(0)
    ids = []
    for engine in engines:
        await engine.start()
        await engine.modules.create(validate(CreateModule, {"name": "layer", "config": CONFIG, "seed": 0}))
        ids.append((await engine.sessions.open("layer", OpenSession())).session)
    query = validate(StepRequest, {"query": rng.standard_normal((1, WIDTH)).astype(np.float32)})
    long = (await engines[0].sessions.open("layer", OpenSession())).session
    shape = HEADS, LONG, WIDTH // HEADS
    past = {name: rng.standard_normal(shape, np.float32) for name in ("past_key", "past_value")}
    await engines[0].sessions.replace_cache(long, validate(ReplaceCache, past))
    crowd = validate(StepRequest, {"query": rng.standard_normal((PAST, WIDTH)).astype(np.float32)})
    for _ in range(IDLE):
        idle = (await engines[1].sessions.open("layer", OpenSession())).session
        await engines[1].sessions.step(idle, query)
    for engine, each in zip(engines, ids, strict=True):
        await engine.sessions.step(each, crowd)
    seconds: dict[str, list[float]] = {"alone": [], "crowded": [], "long": [], "read": []}
    block = torch.from_numpy(np.stack(list(past.values())))
    for turn in range(rounds + 1):
        found = {
            "alone": await _step_seconds(engines[0], ids[0], query, STEPS),
            "crowded": await _step_seconds(engines[1], ids[1], query, STEPS),
            "long": await _step_seconds(engines[0], long, query, 3),
            "read": min(_read_seconds(block) for _ in range(3)),
        }
        for name, value in found.items() if turn else ():
            seconds[name].append(value)
    for engine in engines:
        await engine.stop()
    moved = LONG * TOKEN_BYTES
    rows = [
        (
            f"step over {LONG:,} tokens", spread([1e3 * x for x in seconds["long"]]),
            f"{short(moved / median(seconds['long']) / 1e9)} GB/s of keys and values",
            f"{short(moved / median(seconds['read']) / 1e9)} GB/s, a sum over as many bytes",
            short(median(b / a for a, b in zip(seconds["long"], seconds["read"], strict=True))),
        ),
        (
            f"step over {PAST} tokens, {IDLE:,} idle sessions beside",
            spread([1e3 * x for x in seconds["crowded"]]), "",
            f"{short(1e3 * median(seconds['alone']))} ms without them",
            short(median(b / a for a, b in zip(seconds["alone"], seconds["crowded"], strict=True))),
        ),
    ]  # fmt: skip
    return table(["", "ms", "speed", "beside", "ratio"], rows)


async def _step_seconds(engine: Engine, session: str, query: StepRequest, steps: int) -> float:
    """The median seconds of a step."""
    found = []
    for _ in range(steps):
        started = time.perf_counter()
        await engine.sessions.step(session, query)
        found.append(time.perf_counter() - started)
    return median(found)


def _read_seconds(block: torch.Tensor) -> float:
    started = time.perf_counter()
    block.sum()
    return time.perf_counter() - started


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, 9).parse_args()
    rounds = options.rounds or (fewer(9) if options.quick else 9)

    def lines(folder: Path) -> Iterator[str]:
        yield from served(folder, rounds, quick=options.quick)
        yield f"## Without HTTP\n\n{asyncio.run(in_process(folder, rounds))}\n"

    with TemporaryDirectory() as folder:
        text = TEXT.format(width=WIDTH, heads=HEADS, rounds=rounds)
        publish("Decoding", text, lines(Path(folder)), options.output, ("torch", "transformers", "uvicorn"))


if __name__ == "__main__":
    main()

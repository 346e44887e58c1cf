"""A soak of decode sessions: random operations on many at once, after which no page and no byte is left.

``python -m benchmarks.soak_sessions --minutes 10`` prints what it sees on the way. Exits with 1 if a number is wrong, a
page is leaked, or memory grows.
"""

import argparse
import asyncio
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import torch

from attention_contract.errors import OverBudget, Overloaded, SessionGone
from attention_contract.schemas.attention import ForwardRequest
from attention_contract.schemas.modules import CreateModule
from attention_contract.schemas.sessions import (
    ForkSession,
    OpenSession,
    ReorderSession,
    SessionGradientsRequest,
    StepRequest,
    TruncateSession,
)
from attention_contract.tensors import Array
from attention_contract.validation import validate
from attention_service.runtime.device import Device
from attention_service.runtime.engine import Engine
from benchmarks.tables import short, table

WIDTH, LONGEST = 64, 1500
SPEC = {"masks": [{"name": "causal"}], "position": {"name": "rope"}}
CONFIG = {"d_model": WIDTH, "num_heads": 4, "num_kv_heads": 2, "spec": SPEC}
BUDGET, SHARE = 2**27, 0.15
"""Bytes of the engine's memory, and the share of sessions: too little for all, so that some are evicted."""
GROWTH = 1.15
"""Largest ratio of resident memory in the last third of the minutes to that in the second."""
TOLERANCE = 1e-4


class Walker:
    """One user: a session at a time, and the inputs of its tokens."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.rng = engine, np.random.default_rng(seed)
        self.id = ""
        self.tokens = np.zeros((1, 0, WIDTH), np.float32)
        self.operations = self.lost = self.refused = 0

    async def walk(self, until: float) -> None:
        """Do random operations until then, and end the session."""
        moves = [self.step] * 12 + [self.fork, self.truncate, self.reorder, self.cancel, self.gradients, self.renew]
        await self.open()
        while time.monotonic() < until:
            self.operations += 1
            try:
                await moves[self.rng.integers(len(moves))]()
            except SessionGone:
                self.lost += 1
                await self.open()
            except (Overloaded, OverBudget):
                self.refused += 1
                await asyncio.sleep(0.05)
        with suppress(SessionGone):
            await self.engine.sessions.delete(self.id)

    async def open(self) -> None:
        """Begin with no tokens."""
        asked = OpenSession(share=bool(self.rng.random() < 0.3), pinned=bool(self.rng.random() < 0.02))
        self.id = (await self.engine.sessions.open("layer", asked)).session
        self.tokens = self.tokens[:1, :0]

    async def renew(self) -> None:
        """End the session, or leave it to be evicted, and open another."""
        if self.rng.random() < 0.7:
            await self.engine.sessions.delete(self.id)
        await self.open()

    def fresh(self) -> Array:
        """New tokens for each sequence, now and then many."""
        count = 1 if self.rng.random() < 0.9 else int(self.rng.integers(2, 300))
        return self.rng.standard_normal((len(self.tokens), count, WIDTH)).astype(np.float32)

    async def step(self) -> None:
        """Step; now and then compare with an uncached pass."""
        if self.tokens.shape[1] > LONGEST:
            await self.renew()
        x, extra = self.fresh(), {"return": ["output", "weights"]} if self.rng.random() < 0.1 else {}
        asked = {"query": x, "at": self.tokens.shape[1], "step": str(self.operations)} | extra
        reply = await self.engine.sessions.step(self.id, validate(StepRequest, asked))
        self.tokens = np.concatenate([self.tokens, x], 1)
        if self.rng.random() < 0.01:
            whole = await self.engine.forward("layer", validate(ForwardRequest, {"query": self.tokens}))
            error = np.abs(whole.output[:, -x.shape[1] :] - reply.output).max()
            if error > TOLERANCE:
                raise RuntimeError(f"an output differs by {error} from that of an uncached pass")

    async def fork(self) -> None:
        """Go on in a copy, and end the former session or leave it."""
        copy = (await self.engine.sessions.fork(self.id, ForkSession())).session
        if self.rng.random() < 0.8:
            await self.engine.sessions.delete(self.id)
        self.id = copy

    async def truncate(self) -> None:
        """Forget the last tokens."""
        length = int(self.rng.integers(0, self.tokens.shape[1] + 1))
        await self.engine.sessions.truncate(self.id, TruncateSession(length=length))
        self.tokens = self.tokens[:, :length]

    async def reorder(self) -> None:
        """Let sequences continue others."""
        rows = self.rng.integers(0, len(self.tokens), self.rng.integers(1, 4)).tolist()
        await self.engine.sessions.reorder(self.id, ReorderSession(rows=rows))
        self.tokens = self.tokens[rows]

    async def cancel(self) -> None:
        """Leave in the middle of a step; if it ended before, its tokens are there."""
        x = self.fresh()
        running = asyncio.ensure_future(self.engine.sessions.step(self.id, validate(StepRequest, {"query": x})))
        await asyncio.sleep(self.rng.choice([0, 1e-4, 2e-3]))
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
            self.tokens = np.concatenate([self.tokens, x], 1)

    async def gradients(self) -> None:
        """Differentiate over the past."""
        asked: dict[str, Any] = {"query": self.fresh(), "wrt": ["query"]}
        await self.engine.sessions.gradients(self.id, validate(SessionGradientsRequest, asked))


async def soak(folder: Path, minutes: float, sessions: int) -> list[str]:
    """Let the walkers walk, printing rows on the way; return what is wrong."""
    engine = Engine(folder, Device.open("cpu"), memory_budget=BUDGET, session_share=SHARE)
    await engine.start()
    await engine.create(validate(CreateModule, {"name": "layer", "config": CONFIG, "seed": 0}))
    walkers, process, resident = [Walker(engine, seed) for seed in range(sessions)], psutil.Process(), list[int]()
    until = time.monotonic() + 60 * minutes
    walking = asyncio.gather(*(walker.walk(until) for walker in walkers))
    print(table(["minute", "operations", "sessions", "pages", "shared", "evicted", "lost", "429", "resident, MiB"], []))
    every = max(60 * minutes / 30, 2.0)
    while not walking.done():
        await asyncio.wait([walking], timeout=every)
        resident.append(process.memory_info().rss)
        pool, registry = engine.sessions.pool, engine.sessions.registry
        told = [
            short(minutes - max(until - time.monotonic(), 0) / 60),
            f"{sum(walker.operations for walker in walkers):,}",
            *map(str, (len(registry), pool.pages, pool.shared_pages, registry.counts["evicted"])),
            *(f"{sum(getattr(walker, name) for walker in walkers):,}" for name in ("lost", "refused")),
            short(resident[-1] / 2**20),
        ]
        print(f"| {' | '.join(told)} |", flush=True)
    walking.result()
    for left in list(engine.sessions.registry.live):
        await engine.sessions.delete(left.id)
    pool = engine.sessions.pool
    found = {"pages": pool.pages, "bytes of pages": pool.bytes, "bytes in flight": engine.budget.in_flight}
    found |= {"bytes of replies": engine.sessions.registry.reply_bytes}
    faults = [f"{count} {what} are left" for what, count in found.items() if count]
    third = len(resident) // 3
    if third and max(resident[2 * third :]) > GROWTH * max(resident[third : 2 * third]):
        faults.append("resident memory grew")
    await engine.stop()
    return faults


def main() -> None:
    """Soak, print, exit."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--minutes", type=float, default=10.0)
    made.add_argument("--sessions", type=int, default=64)
    options = made.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        faults = asyncio.run(soak(Path(folder), options.minutes, options.sessions))
    print(*(faults or ["nothing is left"]), sep="\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()

"""A random tree of sessions, walked beside the inputs of each, which are computed anew without a cache in float64."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention_contract.errors import AttentionError, LengthMismatch, SessionGone
from attention_contract.schemas.attention import ForwardReply, ForwardRequest
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.schemas.modules import CreateModule
from attention_contract.schemas.sessions import (
    ForkSession,
    OpenSession,
    ReorderSession,
    ReplaceCache,
    SessionGradientsRequest,
    SessionInfo,
    SessionWeightsRequest,
    StepReply,
    StepRequest,
    StepsRequest,
    TruncateSession,
)
from attention_contract.schemas.weights import WeightsRequest
from attention_contract.tensors import Array
from attention_contract.validation import validate
from attention_service.core.tensors import to_numpy, to_torch
from attention_service.cost import Rates, Roofline
from attention_service.engine import Engine
from attention_service.engine_settings import EngineSettings
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.sessions.page_budget import SessionTotals

D_MODEL = 16
EXACT = "exact"
"""The suffix of the name of a module's copy in float64."""
TOLERANCES = {"float64": 1e-9, "float32": 3e-5, "bfloat16": 0.08}
"""Largest error against float64, as a share of the largest number, or of one."""


def engine_of(root: Path, **settings: Any) -> Engine:
    """An engine whose predicted times are those of one machine."""
    device = Device(torch.device("cpu"), "test", 2**30, Roofline(Rates(1e10, 1e10, 1e-5)))
    return Engine(root, device, EngineSettings(**({"memory_budget": 2**28, "learns_times": False} | settings)))


@asynccontextmanager
async def running(root: Path, **settings: Any) -> AsyncIterator[Engine]:
    """Such an engine while the block runs, after which its sessions end and nothing is left of them."""
    engine = engine_of(root, **settings)
    await engine.start()
    yield engine
    for session in list(engine.sessions.registry.live):
        await engine.sessions.delete(session.id)
    await check_counts(engine)
    await engine.stop()


async def create(engine: Engine, name: str, spec: dict[str, Any], **config: Any) -> None:
    """Make a module, and its copy in float64."""
    shape = {"d_model": D_MODEL, "num_heads": 4, "num_kv_heads": 2, "dtype": "float64"} | config | {"spec": spec}
    await engine.modules.create(validate(CreateModule, {"name": name, "config": shape, "seed": 3}))
    weights = {key: to_numpy(value.double()) for key, value in engine.modules.get(name).parameters.items()}
    exact = {"name": name + EXACT, "config": shape | {"dtype": "float64"}, "parameters": weights}
    await engine.modules.create(validate(CreateModule, exact))


async def uncached(engine: Engine, name: str, tokens: Array, start: int, **fields: Any) -> ForwardReply:
    """The forward pass of the tokens ``[B, L, d]`` from ``start`` on, which see all of them, in float64."""
    body = {"query": tokens[:, start:], "key": tokens, "offsets": start} | fields
    return await engine.forward(name + EXACT, validate(ForwardRequest, body))


def close(found: Any, expected: Any, dtype: str = "float64", largest: float = 1.0) -> None:
    """Assert that two tensors are equal to the tolerance of a dtype. ``largest``: of the numbers they are sums of."""
    found, expected = (np.asarray(to_torch(each).double()) for each in (found, expected))
    largest = max(largest, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCES[dtype] * largest)


@dataclass(eq=False)
class Twin:
    """A session and the inputs of its tokens."""

    id: str
    tokens: Array
    """``[B, length, d_model]``"""
    share: bool = False
    last: tuple[StepRequest, StepReply] | None = None
    """The last step, if it had an id."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.tokens.shape[1]


@dataclass
class Tree:
    """Sessions of one module, and random moves that each check what they change."""

    engine: Engine
    name: str
    dtype: str
    rng: np.random.Generator
    longest: int = 40
    """The most new tokens of a step."""
    twins: list[Twin] = field(default_factory=list)
    made: "count[int]" = field(default_factory=count)

    # ── moves ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def walk(self, moves: int) -> None:
        """Make random moves."""
        named: list[Callable[[Twin], Awaitable[None]]] = [
            self.step, self.step, self.step, self.step_together, self.step_by_taps, self.step_in_turn, self.fork,
            self.truncate, self.reorder, self.fail, self.cancel, self.ask_again, self.ask_weights, self.ask_gradients,
            self.edit, self.export, self.evict, self.delete, self.open_from, self.fork,
        ]  # fmt: skip
        for _ in range(moves):
            if not self.twins or self.rng.random() < 0.08:
                await self.open()
            twin = self.twins[self.rng.integers(len(self.twins))]
            await named[self.rng.integers(len(named))](twin)
            assert all(self.sessions.info(each.id).length == each.length for each in self.twins)
        await check_counts(self.engine, self.twins)

    async def end(self) -> None:
        """Step and end every session: nothing is left."""
        for twin in list(self.twins):
            await self.step(twin)
            await self.delete(twin)
        await check_counts(self.engine)

    @property
    def sessions(self) -> Any:
        """The engine's sessions."""
        return self.engine.sessions

    def fresh(self, sequences: int, tokens: int | None = None) -> Array:
        """New tokens ``[B, n, d_model]``, at times such as another sequence began with."""
        few = self.rng.random() < 0.6
        tokens = tokens or int(self.rng.integers(1, 4 if few else self.longest + 1))
        source = np.random.default_rng(0) if self.rng.random() < 0.3 else self.rng
        dtype = "float64" if self.dtype == "float64" else "float32"
        return source.standard_normal((sequences, tokens, D_MODEL)).astype(dtype)

    async def open(self) -> None:
        """Open an empty session, or begin with a past."""
        share = bool(self.rng.random() < 0.4)
        sequences = int(self.rng.integers(1, 4))
        info = await self.sessions.open(self.name, OpenSession(sequences=sequences, share=share))
        self.twins.append(Twin(info.session, self.fresh(sequences, 1)[:, :0], share))

    async def open_from(self, twin: Twin) -> None:
        """Open a session from another, or from an exported past."""
        if self.rng.random() < 0.5:
            length = int(self.rng.integers(0, twin.length + 1))
            body = {"from": {"session": twin.id, "length": length}}
        else:
            cache, length = await self.sessions.cache(twin.id), twin.length
            body = {"past_key": cache.past_key, "past_value": cache.past_value}
        info = await self.sessions.open(self.name, validate(OpenSession, body))
        self.twins.append(Twin(info.session, twin.tokens[:, :length]))

    async def step(self, twin: Twin) -> None:
        """Take a plain step."""
        await self.appended(twin, self.fresh(len(twin.tokens)))

    async def step_by_taps(self, twin: Twin) -> None:
        """Take a step that returns weights, or by another kernel."""
        taps = {"return": ["output", "weights"], "select": {"heads": [1, 2], "queries": [0]}}
        await self.appended(
            twin, self.fresh(len(twin.tokens)), **(taps if self.rng.random() < 0.5 else {"kernel": "materialized"})
        )

    async def step_together(self, twin: Twin) -> None:
        """Take steps of several sessions in one request, some of which are refused."""
        chosen = [twin, *(each for each in self.twins if each is not twin and self.rng.random() < 0.6)]
        one = self.rng.random() < 0.5
        new = [self.fresh(len(each.tokens), 1 if one else None) for each in chosen]
        bad = self.rng.random(len(chosen)) < 0.15
        requests = [
            {"session": each.id, "query": x, "at": each.length + int(wrong)}
            for each, x, wrong in zip(chosen, new, bad, strict=True)
        ]
        reply = await self.sessions.steps(validate(StepsRequest, {"steps": requests}))
        for each, x, wrong, answer in zip(chosen, new, bad, reply.steps, strict=True):
            if wrong:
                assert (answer.session, answer.status, answer.expected) == (each.id, 409, each.length + 1)
            else:
                await self.check_step(each, x, answer)

    async def step_in_turn(self, twin: Twin) -> None:
        """Take steps of one session at once, which keep their order."""
        new = [self.fresh(len(twin.tokens)) for _ in range(3)]
        requests = [self.sessions.step(twin.id, validate(StepRequest, {"query": x})) for x in new]
        for x, answer in zip(new, await asyncio.gather(*requests), strict=True):
            await self.check_step(twin, x, answer)

    async def fork(self, twin: Twin) -> None:
        """Copy a session, or the first part of it."""
        length = int(self.rng.integers(0, twin.length + 1)) if self.rng.random() < 0.5 else None
        info = await self.sessions.fork(twin.id, ForkSession(length=length))
        assert info.parent == twin.id
        self.twins.append(Twin(info.session, twin.tokens[:, :length], twin.share))
        if len(self.twins) > 8:
            await self.delete(self.twins[self.rng.integers(8)])

    async def truncate(self, twin: Twin) -> None:
        """Forget the last tokens."""
        length = int(self.rng.integers(0, twin.length + 1))
        await self.sessions.truncate(twin.id, TruncateSession(length=length, at=twin.length))
        twin.tokens, twin.last = twin.tokens[:, :length], None

    async def reorder(self, twin: Twin) -> None:
        """Let sequences continue others."""
        rows = self.rng.integers(0, len(twin.tokens), self.rng.integers(1, 4)).tolist()
        info: SessionInfo = await self.sessions.reorder(twin.id, ReorderSession(rows=rows, at=twin.length))
        assert info.sequences == len(rows)
        twin.tokens, twin.last = twin.tokens[rows], None

    async def fail(self, twin: Twin) -> None:
        """Ask for a step that is refused."""
        x = self.fresh(len(twin.tokens))
        requests = [
            {"query": x, "at": twin.length + 1}, {"query": x[..., 1:]}, {"query": x[[0] * (len(x) + 1)]},
            {"query": x, "version": "another"}, {"query": x[0, 0]}, {"query": x, "key": x[0, 0]},
            {"query": x, "edits": [{"tap": "weights", "heads": [9], "set": 0}]},
            {"query": x, "return": ["weights"], "select": {"queries": [x.shape[1]]}},
            {"query": x, "key_mask": np.ones((len(x), twin.length + x.shape[1] + 1), bool)},
        ][self.rng.integers(9)]  # fmt: skip
        with pytest.raises(AttentionError) as refused:
            await self.sessions.step(twin.id, validate(StepRequest, requests))
        assert refused.value.status in {409, 422}
        assert isinstance(refused.value, LengthMismatch) == ("at" in requests)

    async def cancel(self, twin: Twin) -> None:
        """Leave in the middle of a step."""
        body = {"query": self.fresh(len(twin.tokens)), "return": ["output", "weights"][: self.rng.integers(1, 3)]}
        x = body["query"]
        running = asyncio.ensure_future(self.sessions.step(twin.id, validate(StepRequest, body)))
        await asyncio.sleep(self.rng.choice([0, 0, 1e-4, 1e-3]))
        running.cancel()
        with suppress(asyncio.CancelledError):
            await self.check_step(twin, x, await running, output_only=True)
        await gives_back(self.engine)  # what runs stops at its next checkpoint

    async def ask_again(self, twin: Twin) -> None:
        """Take a step with an id twice, or the last one again."""
        if twin.last is None:
            x = self.fresh(len(twin.tokens))
            request = validate(StepRequest, {"query": x, "at": twin.length, "step": f"s{next(self.made)}"})
            reply = await self.sessions.step(twin.id, request)
            await self.check_step(twin, x, reply)
            twin.last = request, reply
        request, reply = twin.last
        again = await self.sessions.step(twin.id, request)
        assert again.length == twin.length
        assert np.array_equal(to_torch(again.output), to_torch(reply.output))
        assert self.sessions.info(twin.id).step == request.step

    async def ask_weights(self, twin: Twin) -> None:
        """Look at the weights of new tokens over the past."""
        x = self.fresh(len(twin.tokens))
        found = await self.sessions.ask(
            "weights", twin.id, validate(SessionWeightsRequest, {"query": x, "at": twin.length})
        )
        whole = np.concatenate([twin.tokens, x], 1)
        body = {"query": x, "key": whole, "offsets": twin.length}
        expected = await self.engine.ask("weights", self.name + EXACT, validate(WeightsRequest, body))
        close(found.weights, expected.weights, self.dtype)

    async def ask_gradients(self, twin: Twin) -> None:
        """Differentiate with respect to new tokens, and to the cached keys and values."""
        x = self.fresh(len(twin.tokens))
        wrt = ["query", "past_key", "past_value", "parameters"] if twin.length else ["query", "parameters"]
        body = {"query": x, "wrt": wrt, "upstream": self.fresh(len(x), x.shape[1])}
        found = await self.sessions.ask("gradients", twin.id, validate(SessionGradientsRequest, body))
        past = await self.past(twin)
        expected = await self.engine.ask("gradients", self.name + EXACT, validate(GradientsRequest, body | past))
        assert set(found.gradients) == set(expected.gradients)
        # The gradient of a key's bias is zero as a sum over keys, so its error is that of what is summed.
        largest = max(float(to_torch(each).abs().max()) for each in expected.gradients.values())
        for name, value in found.gradients.items():
            close(value, expected.gradients[name], self.dtype, largest)

    async def edit(self, twin: Twin) -> None:
        """Take a step with edits in a copy: it answers and caches what a forward pass over the same past does."""
        info = await self.sessions.fork(twin.id, ForkSession())
        x = self.fresh(len(twin.tokens))
        edits = [{"tap": "k", "keys": [twin.length], "scale": 2.0}, {"tap": "scores", "heads": [1], "set": 0.5}]
        body = {"query": x, "edits": edits, "return": ["output", "k", "v"]}
        reply = await self.sessions.step(info.session, validate(StepRequest, body))
        expected = await self.engine.forward(self.name + EXACT, validate(ForwardRequest, body | await self.past(twin)))
        close(reply.output, expected.output, self.dtype)
        cache = await self.sessions.cache(info.session)
        close(cache.past_key, expected.k[:, :, : reply.length], self.dtype)
        close(cache.past_value, expected.v[:, :, : reply.length], self.dtype)
        await self.sessions.delete(info.session)

    async def export(self, twin: Twin) -> None:
        """Export the cache, and import the first part of it: it is the cache of an uncached pass."""
        cache = await self.sessions.cache(twin.id)
        if not twin.length:
            assert cache.past_key.shape[2] == 0
            return
        past = await self.past(twin)
        close(cache.past_key, past["past_key"], self.dtype)
        close(cache.past_value, past["past_value"], self.dtype)
        keep = int(self.rng.integers(1, twin.length + 1))
        part = {name: getattr(cache, name)[:, :, :keep] for name in past}
        info = await self.sessions.replace_cache(twin.id, validate(ReplaceCache, part))
        assert info.length == keep
        twin.tokens, twin.last = twin.tokens[:, :keep], None

    async def evict(self, twin: Twin) -> None:
        """Lose a session, and replay its inputs into another."""
        registry = self.sessions.registry
        registry.end(registry.get(twin.id), "evicted")
        with pytest.raises(SessionGone) as gone:
            self.sessions.info(twin.id)
        assert gone.value.facts["reason"] == "evicted"
        await self.replay(twin)

    async def crash(self, engine: Engine) -> None:
        """Lose all sessions with the engine, and replay their inputs into another one's."""
        self.engine = engine
        for twin in self.twins:
            with pytest.raises(SessionGone) as gone:
                self.sessions.info(twin.id)
            assert gone.value.facts["reason"] == "restarted"
            await self.replay(twin)

    async def delete(self, twin: Twin) -> None:
        """End a session."""
        await self.sessions.delete(twin.id)
        self.twins.remove(twin)

    # ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def replay(self, twin: Twin) -> None:
        """Open another session with the same inputs."""
        info = await self.sessions.open(self.name, OpenSession(sequences=len(twin.tokens), share=twin.share))
        twin.id, twin.last = info.session, None
        tokens, twin.tokens = twin.tokens, twin.tokens[:, :0]
        if tokens.shape[1]:
            await self.appended(twin, tokens)

    async def past(self, twin: Twin) -> dict[str, Array]:
        """The cached keys and values, computed without a cache."""
        if not twin.length:
            return {}
        found = await uncached(self.engine, self.name, twin.tokens, 0, **{"return": ["k", "v"]})
        return {"past_key": found.k[:, :, : twin.length], "past_value": found.v[:, :, : twin.length]}

    async def appended(self, twin: Twin, x: Array, **fields: Any) -> None:
        """Take a step and check it."""
        reply = await self.sessions.step(twin.id, validate(StepRequest, {"query": x, "at": twin.length} | fields))
        twin.last = None
        await self.check_step(twin, x, reply, **fields)

    async def check_step(
        self, twin: Twin, x: Array, reply: StepReply, *, output_only: bool = False, **fields: Any
    ) -> None:
        """Compare a step that was taken with the uncached pass."""
        del output_only
        start = twin.length
        twin.tokens, twin.last = np.concatenate([twin.tokens, x], 1), None
        assert reply.length == twin.length
        wanted = {name: value for name, value in fields.items() if name in {"return", "select"}}
        expected = await uncached(self.engine, self.name, twin.tokens, start, **wanted)
        close(reply.output, expected.output, self.dtype)
        if "weights" in wanted.get("return", ()):
            close(reply.weights, expected.weights, self.dtype)


async def check_counts(engine: Engine, twins: Sequence[Twin] = ()) -> None:
    """Assert that the pool counts the pages of the live sessions and no others, and that nothing is in flight."""
    sessions = engine.sessions
    users: dict[Any, int] = {}
    for session in sessions.registry.live:
        for table in session.all_tables:
            for part in table.pages:
                for page in range(part.first, part.stop):
                    users[part.slab, page] = users.get((part.slab, page), 0) + 1
    assert len(sessions.registry) == len(twins)
    assert sessions.pool.pages == len(users)
    assert all(slab.users[page] == times for (slab, page), times in users.items())
    await gives_back(engine)
    if not twins:
        pool = sessions.pool
        assert (pool.pages, pool.bytes, pool.held, pool._slabs) == (0, 0, 0, {})
        assert (pool._by_name, pool._names) == ({}, {})
        assert sessions.registry.totals == SessionTotals()
        assert (sessions.registry.reply_bytes, len(sessions.registry.modules)) == (0, 0)


async def gives_back(engine: Engine) -> None:
    """Wait until nothing is in flight: a reply may come a moment before the memory of its request is free."""
    async with asyncio.timeout(10):
        while engine.budget.in_flight:
            await asyncio.sleep(1e-3)

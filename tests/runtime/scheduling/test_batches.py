"""Requests that run together: each caller gets what it would have got alone, whatever becomes of the others."""

import asyncio
import random
import threading
import time

import numpy as np
import pytest
import torch

from attention_contract.errors import DeadlineExceeded, Draining, NeverFits
from attention_contract.positions import Alibi, Rope
from attention_contract.schemas.attention import ForwardRequest, RawForwardRequest, Select
from attention_contract.schemas.modules import CreateModule, ModuleConfig
from attention_contract.schemas.weights import WeightsRequest
from attention_contract.spec import AttentionSpec, Causal, SlidingWindow
from attention_service import engine as engine_module
from attention_service.cost import Rates, Roofline
from attention_service.engine import Engine
from attention_service.engine_settings import EngineSettings
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import forward
from attention_service.runtime.operations.forward import Forward
from attention_service.runtime.scheduling import batches
from attention_service.runtime.scheduling.executor import Executor

RATES = Rates(flops_per_s=1e11, bytes_per_s=1e10, overhead_s=1e-3)
"""Of a device on which the start is nearly all there is: everything gains by running together."""
SPECS = {
    "plain": AttentionSpec(),
    "causal": AttentionSpec(masks=[Causal()]),
    "aligned": AttentionSpec(masks=[Causal(align="bottom_right")]),
    "window": AttentionSpec(masks=[SlidingWindow(left=2, right=1)], position=Rope()),
    "by-reach": AttentionSpec(
        position=Rope(scaling={"name": "ntk", "factor": 4, "original_max_position_embeddings": 3})
    ),
    "biased": AttentionSpec(position=Alibi(), normalizer={"name": "sigmoid"}),
    "sparse": AttentionSpec(normalizer={"name": "sparsemax"}),
    "linear": AttentionSpec(method={"name": "linear"}),
    "extra": AttentionSpec(add_zero_attn=True),
}


@pytest.fixture(autouse=True)
def company(monkeypatch):
    """Equal requests came together in the last turn too, so that the first of a turn waits for others."""
    monkeypatch.setattr(batches, "BATCH_S", 1.0)
    monkeypatch.setattr(batches, "MIXED_BATCH_S", 1.0)
    monkeypatch.setattr(Executor, "expects_mates", property(lambda _: True, lambda *_: None), raising=False)


@pytest.fixture
def device():
    torch.set_num_threads(1)
    return Device(torch.device("cpu"), "test", 2**34, Roofline(RATES))


@pytest.fixture
async def engine(tmp_path, device):
    """An engine that does not learn times, which choose kernels. Nothing may be held at the end."""
    engine = Engine(tmp_path, device, EngineSettings(learns_times=False))
    await engine.start()
    yield engine
    for _ in range(500):
        if not engine.budget.in_flight:
            break
        await asyncio.sleep(0.01)
    held = engine.budget.in_flight, engine.budget.waiting
    await engine.stop()
    assert held == (0, 0)


async def together(engine, asks):
    """The answers to requests that arrive in one turn: what each gave or how it failed."""
    return await asyncio.gather(*(engine.forward(name, ask) for name, ask in asks), return_exceptions=True)


async def alone(engine, asks):
    answers = []
    for name, ask in asks:
        answers += await together(engine, [(name, ask)])
    return answers


def taps(reply):
    names = ("output", "weights", "scores", "k", "context", "present_key", "present_value")
    return {name: value for name in names if (value := getattr(reply, name)) is not None}


def same(found, expected):
    """Each caller got its own numbers, in its own layout and dtype."""
    for mine, other in zip(found, expected, strict=True):
        if isinstance(other, Exception):
            assert (type(mine), str(mine)) == (type(other), str(other))
            continue
        assert not isinstance(mine, BaseException), mine
        assert taps(mine).keys() == taps(other).keys()
        for name, value in taps(other).items():
            got = taps(mine)[name]
            assert (got.shape, got.dtype) == (value.shape, value.dtype)
            close = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}[other.ran.dtype]
            np.testing.assert_allclose(got.astype(np.float64), value.astype(np.float64), rtol=close, atol=close)
        assert mine.ran.flops == other.ran.flops
        assert mine.ran.peak_bytes == other.ran.peak_bytes


def drawn(rng, kinds):
    """A random request: mostly good ones of these kinds, some that fail, some that hold what is not finite."""
    kind = str(rng.choice(kinds))
    length, batch = int(rng.integers(1, 9)), int(rng.integers(1, 4))
    dtype = np.float64 if rng.random() < 0.1 else np.float32
    shape = (length, 8) if rng.random() < 0.3 else (batch, length, 8)
    x = rng.standard_normal(shape).astype(dtype)
    more = {}
    if rng.random() < 0.1:
        x = x.astype(np.float64)
        x[..., -1, -1] = 1e300  # too large for the module's float32
    if rng.random() < 0.2:
        more["return"] = ["output", "weights"] if kind != "linear" else ["output", "q"]
        if rng.random() < 0.5 and kind != "linear":
            more["select"] = Select(heads=[1])
    if rng.random() < 0.2 and len(shape) == 3 and kind not in {"linear"}:
        more["key_lengths"] = rng.integers(0, length + 1, batch)
    if rng.random() < 0.1 and kind in {"plain", "causal"}:
        past = rng.standard_normal((shape[0] if len(shape) == 3 else 1, 2, 3, 4)).astype(dtype)
        past = past if len(shape) == 3 else past[0]
        more |= {"past_key": past, "past_value": past}
    if rng.random() < 0.05:
        more["mask"] = rng.random((length, length)) < 0.7
    if rng.random() < 0.4 and "past_key" not in more and "return" not in more:
        if rng.random() < 0.5:
            keys = int(rng.integers(1, 9))
            more["key"] = rng.standard_normal((*shape[:-2], keys, 8)).astype(x.dtype)
            more.pop("key_lengths", None), more.pop("mask", None)
        else:
            more["kernel"] = "materialized"
    if rng.random() < 0.1:
        more.get("key", x)[..., 0, 0] = np.nan
    if kind == "linear":
        for name in ("mask", "kernel"):
            more.pop(name, None)
    if rng.random() < 0.3 and kind != "linear":
        more = {name: value for name, value in more.items() if name in {"return", "select"}}
        return None, RawForwardRequest(query=x, num_heads=2, spec=SPECS[kind], **more)
    return kind, ForwardRequest(query=x, **more)


async def modules(engine):
    for name, spec in SPECS.items():
        await engine.modules.create(
            CreateModule(name=name, config=ModuleConfig(d_model=8, num_heads=2, spec=spec), seed=1)
        )


@pytest.mark.long
@pytest.mark.parametrize(("seed", "on_the_loop"), [(0, True), pytest.param(1, False, marks=pytest.mark.slow)])
async def test_random_mixtures_give_each_caller_what_it_gets_alone(engine, seed, on_the_loop):
    rng = np.random.default_rng(seed)
    await modules(engine)
    engine.executor.hold_s = 1.0 if on_the_loop else 0.0
    sizes, failed = set(), 0
    for _ in range(4):
        kinds = rng.choice(list(SPECS), 2, replace=False)
        asks = [drawn(rng, kinds) for _ in range(60)]
        expected = await alone(engine, asks)
        found = await together(engine, asks)
        same(found, expected)
        failed += sum(isinstance(each, Exception) for each in expected)
        assert all(each.ran.batch == 1 for each in expected if not isinstance(each, Exception))
        sizes |= {each.ran.batch for each in found if not isinstance(each, Exception)}
    assert max(sizes) > 2, "hardly anything ran together"
    assert 0 < failed < 80


X = np.random.default_rng(0).standard_normal((1, 8, 8)).astype(np.float32)


def of(length, name="plain", **more):
    return name, ForwardRequest(query=X[:, :length], **more)


@pytest.mark.parametrize("name", ["causal", "sparse"])
async def test_inspections_of_equal_lengths_run_together_too(engine, rng, name):
    await modules(engine)
    for more in ({}, {"top_k": 3}, {"return_weights": True, "select": Select(heads=[1])}):
        asks = [WeightsRequest(query=numbers, **more) for numbers in rng.standard_normal((3, 2, 6, 8))]
        asks.append(WeightsRequest(query=rng.standard_normal((6, 8)), **more))
        alone = [await engine.ask("weights", name, each) for each in asks]
        found = await asyncio.gather(*(engine.ask("weights", name, each) for each in asks))
        assert [each.ran.batch for each in found] == [4] * 4
        for pair in zip(found, alone, strict=True):
            mine, other = (each.model_dump(exclude={"ran"}) for each in pair)
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, equal_nan=True)
    masked = WeightsRequest(query=X, query_mask=np.ones((1, 8), bool))
    found = await asyncio.gather(*(engine.ask("weights", name, masked) for _ in range(2)))
    assert [each.ran.batch for each in found] == [1, 1]


async def test_a_mask_that_would_say_something_else_keeps_lengths_apart(engine):
    """Aligned at the bottom right, another number of queries hides other keys."""
    await modules(engine)
    asks = [of(length, "aligned", key=X) for length in (8, 3, 3)]
    found = await together(engine, asks)
    assert [each.ran.batch for each in found] == [1, 2, 2]
    same(found, await alone(engine, asks))


def job(engine, length, name="plain"):
    _, ask = of(length, name)
    return engine_module.forward.prepare(engine.library.get(name), ask, engine.device, engine.budget.capacity)


@pytest.mark.sampled(name=2)
@pytest.mark.parametrize("name", ["causal", "aligned", "window", "by-reach", "biased", "extra"])
async def test_different_lengths_share_the_projections_of_a_large_module(engine, monkeypatch, name):
    monkeypatch.setattr(forward, "MIXED_BYTES", 0)
    await modules(engine)
    asks = [of(length, name) for length in (8, 3, 5, 8, 1)]
    asks[2] = name, ForwardRequest(query=np.concatenate([X[:, :5], X[:, 3:8]]))
    found = await together(engine, asks)
    assert [each.ran.batch for each in found] == [5] * 5
    same(found, await alone(engine, asks))


@pytest.mark.sampled(name=2)
@pytest.mark.parametrize("name", ["causal", "window", "biased"])
async def test_steps_over_different_pasts_share_the_projections_of_a_large_module(engine, monkeypatch, rng, name):
    monkeypatch.setattr(forward, "MIXED_BYTES", 0)

    def step(past):
        cache = {each: rng.standard_normal((1, 2, past, 4)).astype(np.float32) for each in ("past_key", "past_value")}
        return name, ForwardRequest(query=X[:, past : past + 1], **cache)

    await modules(engine)
    asks = [step(past) for past in (3, 1, 7, 3)]
    found = await together(engine, asks)
    assert [each.ran.batch for each in found] == [4] * 4
    expected = await alone(engine, asks)
    same(found, expected)
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine.present_key, other.present_key, rtol=1e-5, atol=1e-6)


async def test_a_number_that_is_not_finite_stays_in_its_sequence(engine, monkeypatch):
    monkeypatch.setattr(forward, "MIXED_BYTES", 0)
    await modules(engine)
    asks = [of(length) for length in (8, 3, 5)]
    asks[1] = "plain", ForwardRequest(query=np.full((1, 3, 8), np.nan, np.float32))
    found = await together(engine, asks)
    assert [each.ran.batch for each in found] == [3] * 3
    assert np.isnan(found[1].output).all()
    same([found[0], found[2]], await alone(engine, [asks[0], asks[2]]))


async def test_a_batch_ends_where_its_requests_would_take_too_long(engine, monkeypatch):
    await modules(engine)
    jobs = [job(engine, 8) for _ in range(8)]
    monkeypatch.setattr(batches, "BATCH_S", 3.5 * jobs[0].plan.predicted.high)
    assert len(batches.choose(jobs, 2**30).jobs) == 3
    monkeypatch.setattr(batches, "BATCH_S", 0.0)
    assert batches.choose(jobs, 2**30) is None


async def test_a_kind_of_jobs_may_have_a_limit_of_its_own(engine, monkeypatch):
    await modules(engine)
    jobs = [job(engine, 8) for _ in range(8)]
    monkeypatch.setattr(batches, "BATCH_S", 0.0)
    for each in jobs:
        each.prepared.joining.longest_s = 5.5 * each.plan.predicted.high
    assert len(batches.choose(jobs, 2**30).jobs) == 5


async def test_a_fault_of_all_together_is_nobody_s_who_runs_well_alone(engine, monkeypatch):
    await modules(engine)
    asks = [of(8) for _ in range(6)]
    asks[3] = "plain", ForwardRequest(query=X * 2)
    expected = await alone(engine, asks)
    real = Forward.launch

    def fails(self, uploaded):
        bound = self.bound
        if bound.batch > 1:
            raise MemoryError
        if np.array_equal(bound.arrays["query"], X * 2):
            raise ZeroDivisionError
        return real(self, uploaded)

    monkeypatch.setattr(Forward, "launch", fails)
    found = await together(engine, asks)
    assert isinstance(found.pop(3), ZeroDivisionError)
    same(found, expected[:3] + expected[4:])
    assert {each.ran.batch for each in found} == {1}


@pytest.mark.sampled(seed=1)
@pytest.mark.parametrize("seed", range(2))
async def test_those_who_go_away_take_nobody_with_them_and_leave_nothing_behind(engine, seed):
    rng = random.Random(seed)
    await modules(engine)
    engine.executor.hold_s = rng.choice([0.0, 1.0])
    asks = [of(rng.randrange(1, 9), rng.choice(["plain", "causal"])) for _ in range(60)]
    expected, tasks = await alone(engine, asks), []
    for name, ask in asks:
        tasks.append(asyncio.create_task(engine.forward(name, ask)))
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            rng.choice(tasks).cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    kept = [index for index, each in enumerate(found) if not isinstance(each, asyncio.CancelledError)]
    assert 20 < len(kept) < 60
    same([found[index] for index in kept], [expected[index] for index in kept])


class Gate:
    """Holds passes up, and notes which there were. Those that only count, for a plan, go through."""

    def __init__(self, monkeypatch):
        self.open, self.passes, self.real = threading.Event(), [], Forward.launch

        def launch(operation, uploaded):
            return self.run(operation, uploaded)

        monkeypatch.setattr(Forward, "launch", launch)

    def run(self, operation, uploaded):
        if any(tensor.is_meta for tensor in uploaded.tensors.values()):
            return self.real(operation, uploaded)
        bound = operation.bound
        self.passes.append((bound.module.name, bound.batch, threading.current_thread() is threading.main_thread()))
        self.open.wait(10)
        return self.real(operation, uploaded)


async def test_the_first_that_waits_is_never_passed_over(engine, monkeypatch):
    gate = Gate(monkeypatch)
    await modules(engine)
    engine.executor.hold_s = 0.0
    tasks = [asyncio.create_task(engine.forward(*of(8, "sparse")))]
    while not gate.passes:
        await asyncio.sleep(0.001)
    order = ["plain", "causal", "plain", "window", "causal", "plain"]
    tasks += [asyncio.create_task(engine.forward(*of(8, name))) for name in order]
    while engine.budget.waiting < len(order):
        await asyncio.sleep(0.001)
    gate.open.set()
    await asyncio.gather(*tasks)
    assert [each[:2] for each in gate.passes] == [("sparse", 1), ("plain", 3), ("causal", 2), ("window", 1)]


async def test_the_budget_is_never_exceeded_and_everybody_is_answered(engine, monkeypatch):
    rng, most = np.random.default_rng(0), []
    await modules(engine)
    one = await engine.forward(*of(8))
    engine.budget.total = engine.library.resident_bytes + 5 * one.ran.peak_bytes // 2
    real = Forward.launch

    def watched(*arguments):
        most.append(engine.budget.in_flight + engine.library.resident_bytes)
        return real(*arguments)

    monkeypatch.setattr(Forward, "launch", watched)
    asks = [of(int(length)) for length in rng.integers(1, 9, 80)]
    found = await together(engine, asks)
    same(found, await alone(engine, asks))
    assert max(most) <= engine.budget.total
    assert max(each.ran.batch for each in found) > 1


@pytest.mark.sampled(hold=1)
@pytest.mark.parametrize("hold", [0.0, 1.0])
async def test_what_has_not_begun_at_its_deadline_is_not_computed(engine, monkeypatch, hold):
    gate = Gate(monkeypatch)
    await modules(engine)
    engine.executor.hold_s = 0.0
    deadline = time.monotonic() + 0.5
    runs = asyncio.create_task(engine.forward(*of(8, "sparse"), deadline))
    while not gate.passes:
        assert not runs.done()
        await asyncio.sleep(0.001)
    engine.executor.hold_s = hold
    alone = engine.budget.in_flight
    late = [asyncio.create_task(engine.forward(*of(8), time.monotonic() + 0.02)) for _ in range(2)]
    soon = asyncio.create_task(engine.forward(*of(8), time.monotonic() + 60))
    for each in late:
        with pytest.raises(DeadlineExceeded):
            await each
    held = engine.budget.in_flight - alone
    await asyncio.sleep(max(deadline - time.monotonic(), 0) + 0.01)
    gate.open.set()
    assert (await runs).output.shape == (1, 8, 8)  # it had begun
    assert (await soon).ran.batch == 1
    assert held == soon.result().ran.peak_bytes
    assert [each[:2] for each in gate.passes] == [("sparse", 1), ("plain", 1)]


async def test_a_deadline_ends_the_wait_for_memory_too(engine):
    await modules(engine)
    await engine.budget.acquire(engine.budget.available)
    taken = engine.budget.in_flight
    with pytest.raises(DeadlineExceeded):
        await engine.forward(*of(8), time.monotonic() + 0.02)
    engine.budget.release(taken)
    assert (await engine.forward(*of(8), time.monotonic() + 60)).output.shape == (1, 8, 8)
    with pytest.raises(DeadlineExceeded):
        await engine.forward(*of(8), time.monotonic())


async def test_a_stop_refuses_what_waits_and_ends_what_runs(tmp_path, device, monkeypatch):
    gate = Gate(monkeypatch)
    engine = Engine(tmp_path, device, EngineSettings(learns_times=False))
    await engine.start()
    await modules(engine)
    engine.executor.hold_s = 0.0
    runs = asyncio.create_task(engine.forward(*of(8)))
    while not gate.passes:
        await asyncio.sleep(0.001)
    waits = asyncio.create_task(engine.forward(*of(8)))
    while not engine.budget.waiting:
        await asyncio.sleep(0.001)
    stopping = asyncio.create_task(engine.stop())
    with pytest.raises(Draining):
        await waits
    gate.open.set()
    assert (await runs).output.shape == (1, 8, 8)
    await stopping
    assert engine.budget.in_flight == 0


FAULTS = {
    "kernel": (ZeroDivisionError(), ZeroDivisionError),
    "allocator": (MemoryError(), NeverFits),
    "cpu": (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), NeverFits),
    "gpu": (torch.OutOfMemoryError("CUDA out of memory"), NeverFits),
}


@pytest.mark.sampled
@pytest.mark.parametrize(("fault", "message"), FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("on_the_loop", [True, False])
async def test_a_request_that_breaks_its_pass_fails_alone(engine, monkeypatch, fault, message, on_the_loop):
    await modules(engine)
    if not on_the_loop:
        monkeypatch.setattr(Executor, "_stays", lambda *_: False)
    asks = [of(length, name) for length in (8, 5, 8) for name in ("plain", "causal", "plain")]
    poisoned = 4
    name, request = asks[poisoned]
    asks[poisoned] = name, request.model_copy(update={"query": request.query + np.float32(1000)})
    expected = await alone(engine, asks)
    real = Forward.launch

    def fails(self, uploaded):
        if self.bound.arrays["query"].max() > 500 and not uploaded.tensors["query"].is_meta:
            raise fault
        return real(self, uploaded)

    monkeypatch.setattr(Forward, "launch", fails)
    for _ in range(2):  # what was left of the first fault does not harm the next pass
        found = await together(engine, asks)
        assert isinstance(found.pop(poisoned), message)
        same(found, expected[:poisoned] + expected[poisoned + 1 :])

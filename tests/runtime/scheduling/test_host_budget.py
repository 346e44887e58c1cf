"""The host's memory beside a GPU: a budget of its own for bodies, results and replies. A GPU of 80 GB, a host of 16."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from tests.stand_in_gpu import stand_in_gpu

from attention_contract.errors import NeverFits, OverBudget, Overloaded
from attention_contract.schemas.attention import RawForwardRequest
from attention_contract.schemas.gradients import RawGradientsRequest
from attention_contract.schemas.modules import CreateModule, ModuleConfig
from attention_contract.schemas.sessions import OpenSession
from attention_contract.schemas.weights import RawWeightsRequest
from attention_service.api import residency
from attention_service.engine import Engine
from attention_service.engine_settings import EngineSettings
from attention_service.runtime.device import torch_device
from attention_service.runtime.operations import forward, gradients, weights
from attention_service.runtime.operations.forward import Forward
from attention_service.runtime.scheduling.budget import BodyMemory
from attention_service.runtime.sessions import step

GB = 10**9
HOST = 16 * GB


@pytest.fixture
def device(monkeypatch, tmp_path):
    """The host has 64 GB, of which a container may have 16."""
    limit = tmp_path / "memory.max"
    limit.write_text(f"{HOST}\n")
    monkeypatch.setattr(torch_device, "_CGROUP_LIMITS", (limit,))
    memory = SimpleNamespace(total=64 * GB, available=60 * GB)
    monkeypatch.setattr(torch_device.psutil, "virtual_memory", lambda: memory)
    with stand_in_gpu(monkeypatch, 80 * GB) as device:
        yield device


@pytest.fixture
async def engine(tmp_path, device):
    engine = Engine(tmp_path, device, EngineSettings(learns_times=False))
    await engine.start()
    yield engine
    await engine.stop()
    assert (engine.budget.in_flight, engine.host.in_flight) == (0, 0)


def zeros(*shape):
    """A tensor of a request that takes no memory here."""
    return np.broadcast_to(np.zeros((), np.float32), shape)


async def test_each_has_its_own_budget(engine):
    assert (engine.budget.total, engine.host.total) == (64 * GB, HOST * 8 // 10)


async def test_bodies_are_held_by_the_host_and_take_nothing_of_the_gpu(engine):
    body, other = BodyMemory(engine.host), BodyMemory(engine.host)
    with pytest.raises(NeverFits, match="the host has 16000000000 in all"):
        body.expect(32 * GB)
    with pytest.raises(OverBudget, match="or raise host_memory_budget"):
        body.expect(15 * GB)
    body.hold(6 * GB)
    with pytest.raises(Overloaded, match="half of what host_memory_budget leaves beside pinned memory"):
        other.hold(GB)
    assert engine.budget.available == 64 * GB
    body.give_back()
    other.hold(GB)
    other.give_back()


async def test_results_beyond_the_host_are_refused_before_anything_runs(engine, monkeypatch):
    launched, real = [], Forward.launch

    def launch(self, uploaded):
        if not uploaded.tensors["query"].is_meta:
            launched.append(self)
        return real(self, uploaded)

    monkeypatch.setattr(Forward, "launch", launch)
    query = zeros(1, 4, 2**15, 4)
    with pytest.raises(NeverFits, match=r"needs an estimated 17\d{9} bytes at its peak; the host has 16000000000"):
        await engine.forward(None, RawForwardRequest(query=query, return_=["weights"], kernel="materialized"))
    assert not launched
    job = forward.prepare(None, RawForwardRequest(query=query), engine.device, 64 * GB)
    assert job.plan.host_bytes < 10**7, "the output alone"


async def test_a_request_that_is_not_admitted_by_the_gpu_gives_the_host_its_memory_back(engine):
    with pytest.raises((OverBudget, NeverFits), match=r"the device has|the memory budget"):
        await engine.forward(None, RawForwardRequest(query=zeros(1, 64, 2**16, 4), kernel="materialized"))
    assert engine.host.in_flight == 0
    waiting = asyncio.ensure_future(
        engine.forward(None, RawForwardRequest(query=np.ones((1, 1, 4, 4), np.float32)), None)
    )
    assert engine.budget.take(64 * GB)
    await asyncio.sleep(0.05)
    assert engine.host.in_flight > 0
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert engine.host.in_flight == 0
    engine.budget.release(64 * GB)


async def test_a_request_holds_its_results_on_the_host_while_it_runs(engine, monkeypatch):
    seen, real = [], Forward.launch

    def launch(self, uploaded):
        seen.append(engine.host.in_flight)
        return real(self, uploaded)

    monkeypatch.setattr(Forward, "launch", launch)
    x = np.random.default_rng(0).standard_normal((1, 2, 256, 8)).astype(np.float32)
    reply = await engine.forward(None, RawForwardRequest(query=x, return_=["weights"]))
    assert seen[-1] >= reply.weights.nbytes


async def test_modules_are_made_on_both(engine, monkeypatch):
    seen, real = [], engine.library.create

    def create(request):
        seen.append((engine.budget.in_flight, engine.host.in_flight))
        return real(request)

    monkeypatch.setattr(engine.library, "create", create)
    await engine.modules.create(CreateModule(name="m", config=ModuleConfig(d_model=64, num_heads=2)))
    ((on_device, on_host),) = seen
    assert on_device == on_host >= 4 * 64 * 64 * 4
    assert engine.budget.available < 64 * GB


async def test_the_cache_of_a_session_is_read_with_memory_of_the_host(engine, monkeypatch):
    await engine.modules.create(CreateModule(name="m", config=ModuleConfig(d_model=64, num_heads=2)))
    past = np.ones((1, 2, 100, 32), np.float32)
    session = (await engine.sessions.open("m", OpenSession(past_key=past, past_value=past))).session
    seen, real = [], step.past_of

    def past_of(session):
        seen.append((engine.budget.in_flight, engine.host.in_flight))
        return real(session)

    monkeypatch.setattr(step, "past_of", past_of)
    cache = await engine.sessions.cache(session)
    np.testing.assert_array_equal(cache.past_key, past)
    ((on_device, on_host),) = seen
    assert on_device == 0
    assert on_host >= 2 * past.nbytes


async def test_pinned_memory_counts_and_goes_back(engine, device, monkeypatch):
    before = engine.host.capacity
    device.unused_pinned = 3 * GB
    device.look_at_pinned(most=4 * GB)
    assert engine.host.capacity == before - 3 * GB
    monkeypatch.setattr(residency, "_LOOK_S", 0.01)
    monkeypatch.setattr(residency, "to_tick", lambda: 0.01)
    watching = asyncio.create_task(residency.keep_within_budget(engine))
    for _ in range(500):
        if not device.pinned_bytes:
            break
        await asyncio.sleep(0.01)
    watching.cancel()
    assert (device.unused_pinned, engine.host.capacity) == (0, before)


async def test_the_process_is_compared_with_the_budget_of_the_host(engine, monkeypatch):
    sizes = iter([10**8, *([10**8 + 15 * GB] * 2), *([10**8 + 17 * GB] * 1000)])
    monkeypatch.setattr(residency, "resident_bytes", lambda: next(sizes))
    monkeypatch.setattr(residency, "_LOOK_S", 0.01)
    monkeypatch.setattr(residency, "to_tick", lambda: 0.01)
    monkeypatch.setattr(residency, "_REST_S", 0.01)
    watching = asyncio.create_task(residency.keep_within_budget(engine))
    for _ in range(500):
        if engine.host.exceeded:
            break
        await asyncio.sleep(0.01)
    watching.cancel()
    assert engine.host.exceeded == 17 * GB - engine.host.total
    engine.host.exceeded = 0


X = np.random.default_rng(0).standard_normal((2, 4, 40, 8)).astype(np.float32)
REQUESTS = {
    "forward": (forward, RawForwardRequest(query=X)),
    "taps": (forward, RawForwardRequest(query=X, return_=["output", "scores", "weights", "lse"])),
    "past": (forward, RawForwardRequest(query=X, past_key=X, past_value=X)),
    "gradients": (gradients, RawGradientsRequest(query=X, key=X, value=X, wrt=["query", "key", "weights"])),
    "weights": (weights, RawWeightsRequest(query=X)),
    "long": (forward, RawForwardRequest(query=zeros(1, 1, 3000, 8), return_=["weights"])),
}


def size_of(value):
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(size_of, value))
    return sum(map(size_of, vars(value).values())) if hasattr(value, "model_fields_set") else 0


@pytest.mark.parametrize(("operation", "request_"), REQUESTS.values(), ids=REQUESTS)
def test_the_planned_results_bound_the_reply(device, operation, request_):
    job = operation.prepare(None, request_, device, 2**34)
    held = size_of(job.run())
    assert held <= job.plan.result_bytes <= 2 * held + 4096


def test_results_of_many_pieces_and_of_sizes_that_are_extrapolated(device):
    """2¹⁸ queries are planned from three smaller sizes."""
    job = forward.prepare(None, RawForwardRequest(query=zeros(1, 1, 2**18, 8)), device, 2**40)
    assert 2**18 * 8 * 4 <= job.plan.result_bytes <= 1.1 * 2**18 * 8 * 4

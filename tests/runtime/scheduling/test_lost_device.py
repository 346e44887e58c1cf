"""Faults of a GPU, played by a stand-in: a broken one is noticed wherever it computes."""

import asyncio
import gc
import weakref

import numpy as np
import pytest
import torch
from tests.stand_in_gpu import ILLEGAL, stand_in_gpu

from attention_contract.errors import Draining, NeverFits, Stuck
from attention_contract.schemas.attention import ForwardRequest, RawForwardRequest
from attention_contract.schemas.modules import CreateModule, ModuleConfig
from attention_service.core.cancellation import Abandoned
from attention_service.engine import Engine
from attention_service.engine_settings import EngineSettings
from attention_service.modules.resident import Module
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations.forward import Forward
from attention_service.runtime.scheduling import batches
from attention_service.runtime.scheduling.executor import Executor

SMALL = np.random.default_rng(0).standard_normal((1, 4, 8)).astype(np.float32)
BROKEN = {
    "cuda": torch.AcceleratorError(f"{ILLEGAL}\nmore words"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb)`"),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
}
EXHAUSTED = {
    "allocator": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "driver": torch.AcceleratorError("CUDA error: out of memory\nmore words"),
}


@pytest.fixture
def device(monkeypatch):
    with stand_in_gpu(monkeypatch) as device:
        yield device


@pytest.fixture
async def engine(tmp_path, device, monkeypatch):
    monkeypatch.setattr(batches, "BATCH_S", 1.0)
    engine = Engine(tmp_path, device, EngineSettings(learns_times=False))
    await engine.start()
    await engine.modules.create(CreateModule(name="m", config=ModuleConfig(d_model=8, num_heads=2)))
    yield engine
    await engine.stop()
    assert engine.budget.in_flight == 0


async def answers_of(engine, count):
    """The answers to requests that run in one pass."""
    request = ForwardRequest(query=SMALL, return_=["output", "context"])
    return await asyncio.gather(*(engine.forward("m", request) for _ in range(count)), return_exceptions=True)


def launches_fail(monkeypatch, fault, device=None):
    """Let every launch fail; a device that is given is broken by it. Returns weak references to what they held."""
    real, held = Forward.launch, []

    def launch(self, uploaded):
        if uploaded.tensors["query"].is_meta:
            return real(self, uploaded)
        tensor = torch.empty(1000)
        held.append(weakref.ref(tensor))
        if device is not None:
            device.poison(fault)
        raise fault

    monkeypatch.setattr(Forward, "launch", launch)
    return held


@pytest.mark.parametrize("count", [1, 3], ids=["alone", "joint"])
@pytest.mark.parametrize("fault", BROKEN.values(), ids=BROKEN)
async def test_a_device_that_a_pass_broke_takes_no_work_and_is_not_live(engine, device, monkeypatch, fault, count):
    monkeypatch.setattr(Executor, "expects_mates", property(lambda _: count > 1, lambda *_: None), raising=False)
    assert all(reply.ran.batch == count for reply in await answers_of(engine, count))
    engine.runner.check_live()
    launches_fail(monkeypatch, fault, device)
    assert [type(answer) for answer in await answers_of(engine, count)] == [Stuck] * count
    assert device.lost == str(fault).splitlines()[0]
    for ask in (engine.runner.check_live, engine.runner.check_ready):
        with pytest.raises(Stuck, match=r"computes nothing any more \(.*; restart the server"):
            ask()
    with pytest.raises(Stuck):
        await engine.forward("m", ForwardRequest(query=SMALL))


@pytest.mark.parametrize("fault", BROKEN.values(), ids=BROKEN)
async def test_an_error_that_passes_ends_its_own_request_alone(engine, device, monkeypatch, fault):
    """Such as a launch with a grid that no device has: the next call finds a device that computes."""
    launches_fail(monkeypatch, fault)
    assert await answers_of(engine, 1) == [fault]
    assert device.lost is None
    monkeypatch.undo()
    assert (await answers_of(engine, 1))[0].output.shape == SMALL.shape
    engine.runner.check_live()


async def test_a_device_that_breaks_between_the_passes_is_noticed_by_whoever_comes_next(engine, device):
    device.poison()
    assert [type(answer) for answer in await answers_of(engine, 1)] == [Stuck]
    assert device.lost == ILLEGAL


async def test_a_device_that_breaks_while_parameters_are_copied_is_noticed(engine, device, monkeypatch):
    def on(self, place):
        device.poison()
        device.fail_if_poisoned()

    monkeypatch.setattr(Module, "on", on)
    with pytest.raises(torch.AcceleratorError):
        await engine.modules.create(CreateModule(name="n", config=ModuleConfig(d_model=8, num_heads=2)))
    with pytest.raises(Stuck):
        engine.runner.check_live()


async def test_work_without_a_job_notices_it_too(engine, device):
    def work():
        device.poison()
        device.fail_if_poisoned()

    with pytest.raises(torch.AcceleratorError):
        await engine.executor.call(work)
    assert device.lost == ILLEGAL
    with pytest.raises(Stuck):
        await engine.executor.call(work)


def test_memory_that_a_broken_device_does_not_take_back(device):
    device.poison()
    device.give_back_cached()
    assert device.lost == ILLEGAL


def test_cached_memory_stays_where_enough_is_free(device):
    device.give_back_cached(device.total_bytes)
    assert device.given_back == 0
    device.give_back_cached(device.total_bytes + 1)
    assert device.given_back == 1


@pytest.mark.sampled
@pytest.mark.parametrize("count", [1, 3], ids=["alone", "joint"])
@pytest.mark.parametrize("fault", EXHAUSTED.values(), ids=EXHAUSTED)
async def test_no_tensor_outlives_a_pass_that_ran_out_of_memory(engine, device, monkeypatch, fault, count):
    monkeypatch.setattr(Executor, "expects_mates", property(lambda _: count > 1, lambda *_: None), raising=False)
    held = launches_fail(monkeypatch, fault)
    gc.disable()  # nothing may need the collector
    try:
        answers = await answers_of(engine, count)
        assert [type(answer) for answer in answers] == [NeverFits] * count
        assert held
        assert [tensor() for tensor in held] == [None] * len(held), "while its answer is held"
    finally:
        gc.enable()
    assert all(answer.__context__ is None and answer.__cause__ is None for answer in answers)
    assert device.given_back == len(held), "cached memory goes back after each"
    assert device.lost is None


async def test_no_tensor_outlives_a_pass_that_failed_otherwise(engine, monkeypatch):
    held = launches_fail(monkeypatch, ZeroDivisionError())
    answers = await answers_of(engine, 1)
    assert [type(answer) for answer in answers] == [ZeroDivisionError]
    assert [tensor() for tensor in held] == [None]


async def test_what_an_abandoned_pass_launched_is_waited_for(engine, device, monkeypatch):
    """It may still write to pages of a session, which the next step reads on another stream."""
    waits = []
    monkeypatch.setattr(device, "probe", lambda: waits.append(1))
    launches_fail(monkeypatch, Abandoned())
    assert [type(answer) for answer in await answers_of(engine, 1)] == [Draining]
    assert waits == [1]


@pytest.mark.gpu
def test_what_an_abandoned_pass_launched_on_a_gpu_is_waited_for():
    device = Device.open("cuda")
    x, done = torch.rand(4096, 4096, device=device.torch), torch.cuda.Event()
    for _ in range(100):
        x = x @ x / 4096
    done.record()
    assert not done.query()
    device.recover(Abandoned())
    assert done.query()


async def test_raw_attention_is_watched_like_modules(engine, device, monkeypatch):
    launches_fail(monkeypatch, BROKEN["cuda"], device)
    with pytest.raises(Stuck):
        await engine.forward(None, RawForwardRequest(query=np.ones((1, 1, 1, 2), np.float32)))

"""The engine without HTTP: readiness, draining, cancellation, and what a full device is told."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.conftest import asker

from attention_contract.errors import Draining, Loading, NeverFits
from attention_contract.schemas.analyses.recording_statistics import RecordingStatisticsRequest
from attention_contract.schemas.attention import RawForwardRequest
from attention_contract.schemas.gradients import RawGradientsRequest
from attention_contract.schemas.modules import CreateModule, ModuleConfig
from attention_contract.schemas.recordings import EXAMPLE_RECORDING, RecordingFile
from attention_contract.schemas.weights import RawWeightsRequest
from attention_contract.spec import AllOf, AnyOf, AttentionSpec, Causal, GlobalTokens, RandomBlocks, SlidingWindow
from attention_service import engine as engine_module
from attention_service.cost import Rates, Roofline
from attention_service.engine import Engine
from attention_service.engine_settings import EngineSettings
from attention_service.modules.library import Library
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import recorded_statistics
from attention_service.runtime.operations.forward import Forward
from attention_service.runtime.operations.questions import QUESTIONS
from attention_service.runtime.services import store_follower

ASK = RawForwardRequest(query=np.eye(2, dtype=np.float32))


@pytest.fixture
def device():
    return Device(torch.device("cpu"), "test", 2**30, Roofline(Rates(1e10, 1e10, 1e-5)))


async def test_nothing_is_answered_before_the_store_is_loaded_nor_after_a_stop(tmp_path, device):
    engine = Engine(tmp_path, device)
    with pytest.raises(Loading) as loading:
        await engine.forward(None, ASK)
    assert loading.value.retry_after
    await engine.start()
    assert (await engine.forward(None, ASK)).output.shape == (2, 2)
    engine.drain()
    with pytest.raises(Draining):
        await engine.forward(None, ASK)
    await engine.stop()


async def test_a_stop_during_the_load_stays_a_stop(tmp_path, device):
    engine = Engine(tmp_path, device)
    engine.drain()
    await engine.start()
    assert engine.state == "draining"
    await engine.stop()


DRAWS = [RandomBlocks(size=1, count=64, seed=seed) for seed in range(15)]
LABOUR = {
    "none": ([], 8, True),
    "causal": ([Causal()], 8, True),
    "many draws": ([AnyOf(of=DRAWS)], 8, False),
    "many marks": ([GlobalTokens(positions=list(range(4096)))] * 4, 8, False),
    "many masks": ([AllOf(of=[SlidingWindow(left=i) for i in range(16)]), Causal()], 8, False),
    "many tiles": ([SlidingWindow(left=1)], 50_000, False),
}


PLANNED = [("forward", kind) for kind in LABOUR] + [("gradients", "many marks"), ("weights", "many marks")]


@pytest.mark.sampled(question=2, kind=2)
@pytest.mark.parametrize(("question", "kind"), PLANNED)
async def test_what_takes_long_to_plan_or_consists_of_much_is_not_done_on_the_event_loop(
    tmp_path, monkeypatch, question, kind
):
    masks, length, quick = LABOUR[kind]
    made = {"forward": RawForwardRequest, "gradients": RawGradientsRequest, "weights": RawWeightsRequest}[question]
    loop, planned, ran = threading.get_ident(), [], []
    prepare = QUESTIONS[question][0] if question in QUESTIONS else engine_module.forward.prepare

    def watched(*arguments):
        planned.append(threading.get_ident())
        job = prepare(*arguments)

        def upload(_):
            ran.append(threading.get_ident())
            raise Done

        operation = SimpleNamespace(upload=upload, launch=None, collect=None)
        return replace(job, prepared=replace(job.prepared, joining=None, operation=lambda _: operation))

    # By its rates, this device does anything in no time.
    engine = Engine(
        tmp_path,
        Device(torch.device("cpu"), "test", 2**40, Roofline(Rates(1e18, 1e18, 1e-9))),
        EngineSettings(memory_budget=2**40),
    )
    await engine.start()
    engine.executor.hold_s = 1e-3
    if question in QUESTIONS:
        monkeypatch.setitem(QUESTIONS, question, (watched, QUESTIONS[question][1]))
    else:
        monkeypatch.setattr(engine_module.forward, "prepare", watched)
    ask = made(query=np.zeros((1, 1, length, 1), np.float32), spec=AttentionSpec(masks=masks))
    with pytest.raises(Done):
        await asker(engine, question)(None, ask)
    await engine.stop()
    assert (planned == [loop]) == quick
    if length < 100:
        assert (ran == [loop]) == quick


class Done(Exception):
    """What a job that was told to raises."""


async def test_what_was_given_up_in_the_queue_never_runs_and_frees_its_memory(tmp_path, device, monkeypatch):
    gate, ran = threading.Event(), []
    engine = Engine(tmp_path, device)
    await engine.start()
    real = Forward.launch

    def slow(operation, uploaded):
        if not any(tensor.is_meta for tensor in uploaded.tensors.values()):  # a rehearsal for a plan
            ran.append(1)
            gate.wait(10)
        return real(operation, uploaded)

    monkeypatch.setattr(Forward, "launch", slow)
    engine.executor.hold_s = 0.0  # nothing stays on the event loop
    tasks = [asyncio.create_task(engine.forward(None, ASK))]
    while not ran:
        await asyncio.sleep(0.001)
    tasks += [asyncio.create_task(engine.forward(None, ASK)) for _ in range(2)]
    await asyncio.sleep(0.01)
    tasks[0].cancel()  # running: its memory is held until it ends
    tasks[1].cancel()  # queued: it never runs
    await asyncio.sleep(0.01)
    assert engine.budget.in_flight > 0
    gate.set()
    assert (await tasks[2]).output.shape == (2, 2)
    await engine.stop()
    assert len(ran) == 2
    assert engine.budget.in_flight == 0


async def test_the_memory_of_a_module_is_held_until_its_making_ends_whoever_went_away(tmp_path, device, monkeypatch):
    gate, begun = threading.Event(), threading.Event()
    engine = Engine(tmp_path, device)
    await engine.start()
    real = engine.library.create

    def slow(request):
        begun.set()
        gate.wait(10)
        return real(request)

    monkeypatch.setattr(engine.library, "create", slow)
    making = asyncio.create_task(
        engine.modules.create(CreateModule(name="m", config=ModuleConfig(d_model=64, num_heads=4)))
    )
    assert await asyncio.to_thread(begun.wait, 10)
    making.cancel()
    await asyncio.sleep(0.01)
    assert making.cancelled()
    assert engine.budget.in_flight > 0
    gate.set()
    await engine.stop()
    await asyncio.sleep(0)
    assert engine.budget.in_flight == 0


@pytest.mark.parametrize("fault", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
async def test_a_device_that_is_full_after_all_says_so_and_goes_on(tmp_path, device, monkeypatch, fault):
    engine = Engine(tmp_path, device)
    await engine.start()
    await engine.forward(None, ASK)  # planned, which launches it too
    with monkeypatch.context() as patch:

        def full(*_):
            raise fault

        patch.setattr(Forward, "launch", full)
        with pytest.raises(NeverFits):
            await engine.forward(None, ASK)
    assert (await engine.forward(None, ASK)).output.shape == (2, 2)
    assert engine.budget.in_flight == 0
    await engine.stop()


async def test_resident_modules_count_against_the_budget(tmp_path, device):
    engine = Engine(tmp_path, device, EngineSettings(memory_budget=2**20))
    await engine.start()
    before = engine.budget.available
    info = await engine.modules.create(CreateModule(name="m", config=ModuleConfig(d_model=64, num_heads=4)))
    assert engine.budget.available == before - info.bytes
    assert engine.modules.list().bytes == info.bytes
    await engine.modules.delete("m")
    assert engine.budget.available == before
    await engine.stop()


def test_the_device_says_what_it_is():
    opened = Device.open("cpu")
    assert 0 < opened.free_bytes() <= opened.total_bytes
    assert opened.clock.basis == "rates"
    assert opened.clock.rates.flops_per_s > 1e8
    for wrong in ("cuda:99", "tpu", "meta"):
        with pytest.raises(ValueError, match="device"):
            Device.open(wrong)


@pytest.mark.gpu
async def test_modules_are_resident_on_cuda_and_answer_from_there(tmp_path):
    engine = Engine(tmp_path, Device.open("auto"))
    await engine.start()
    info = await engine.modules.create(CreateModule(name="m", config=ModuleConfig(d_model=64, num_heads=4)))
    assert info.device == "cuda:0"
    reply = await engine.forward(None, ASK)
    assert reply.ran.device == "cuda:0"
    await engine.stop()


async def test_the_device_gets_another_thread_once_what_runs_is_over(tmp_path, device):
    gate, begun = threading.Event(), threading.Event()

    def long():
        begun.set()
        gate.wait(10)
        return threading.current_thread()

    engine = Engine(tmp_path, device)
    await engine.start()
    first = asyncio.create_task(engine.executor.call(long))
    await asyncio.to_thread(begun.wait, 10)
    renewed = asyncio.create_task(engine.executor.renew())
    second = asyncio.create_task(engine.executor.call(threading.current_thread))
    await asyncio.sleep(0.05)
    assert not renewed.done()
    assert not second.done()  # one thing at a time, whichever thread has it
    gate.set()
    old, new = await first, await second
    await renewed
    assert not old.is_alive()
    assert new.is_alive()
    await engine.stop()
    assert not new.is_alive()


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_module_of_another_server_waits_for_its_memory(tmp_path, device, monkeypatch, stopped):
    monkeypatch.setattr(store_follower, "FOLLOW_S", 0.01)

    async def until(true):
        async with asyncio.timeout(10):
            while not true():
                await asyncio.sleep(0.01)

    engine = Engine(tmp_path, device, EngineSettings(memory_budget=10_000))
    await engine.start()
    await engine.budget.acquire(9_500)  # a request
    other = Library(tmp_path, device.torch)
    other.create(CreateModule(name="theirs", config=ModuleConfig(d_model=8, num_heads=2), seed=0))
    await until(lambda: engine.budget.waiting)
    await asyncio.sleep(0.05)
    assert engine.library.list() == []
    if stopped:
        async with asyncio.timeout(10):
            await engine.stop()
        assert engine.budget.in_flight == 9_500
        return
    engine.budget.release(9_500)
    await until(engine.library.list)
    await until(lambda: not engine.budget.in_flight)
    other.create(CreateModule(name="large", config=ModuleConfig(d_model=64, num_heads=2), seed=0))
    await until(lambda: "large" in engine.library.problems)
    assert "memory budget" in engine.library.problems["large"]
    assert engine.budget.in_flight == 0
    await engine.stop()


async def test_statistics_of_a_recording_stop_when_their_caller_is_gone(tmp_path, device, monkeypatch):
    began, work = threading.Event(), recorded_statistics

    def endless(*sizes):
        began.set()
        while True:
            yield from tiles(*sizes)

    tiles = work.row_tiles
    monkeypatch.setattr(work, "row_tiles", endless)
    engine = Engine(tmp_path, device)
    await engine.start()
    info = await engine.recordings.add(RecordingFile.model_validate(EXAMPLE_RECORDING))
    task = asyncio.create_task(engine.recordings.statistics(info.id, RecordingStatisticsRequest()))
    assert await asyncio.to_thread(began.wait, 10)
    assert engine.budget.in_flight > 0
    task.cancel()
    async with asyncio.timeout(60):
        while engine.budget.in_flight:
            await asyncio.sleep(0.01)
    await engine.stop()

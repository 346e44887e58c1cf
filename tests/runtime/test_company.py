"""Who comes alone runs at once, in the turn in which it came; who has company waits for it, and runs with it."""

import asyncio

import numpy as np
import pytest
import torch

from attention_contract.schemas.attention import ForwardRequest
from attention_contract.schemas.modules import CreateModule, ModuleConfig
from attention_service.cost import Rates, Roofline
from attention_service.runtime.device import Device
from attention_service.runtime.engine import Engine
from attention_service.runtime.operations import forward
from attention_service.runtime.scheduling.batching import choose
from attention_service.runtime.scheduling.joining import Size

X = np.random.default_rng(0).standard_normal((1, 4, 8)).astype(np.float32)
RATES = Rates(flops_per_s=1e11, bytes_per_s=1e10, overhead_s=1e-3)
"""Of a device on which the start is nearly all there is: everything gains by running together."""


class Caller:
    """Who waits for an answer, and what it was."""

    def __init__(self):
        self.ended = None

    def done(self):
        return self.ended is not None

    def set_result(self, result):
        self.ended = result

    set_exception = set_result


@pytest.fixture
def play(tmp_path):
    """Tell a story of an engine with one module that runs everything on the event loop."""

    def play(story):
        async def whole():
            torch.set_num_threads(1)
            engine = Engine(tmp_path, Device(torch.device("cpu"), "test", 2**34, Roofline(RATES)))
            await engine.start()
            try:
                await engine.create(CreateModule(name="m", config=ModuleConfig(d_model=8, num_heads=2), seed=1))
                engine.execution.hold_s = 1.0
                await pause()
                await story(engine)
                await pause()
                assert (engine.budget.in_flight, engine.budget.waiting) == (0, 0)
            finally:
                await engine.stop()

        asyncio.run(whole())

    return play


async def pause():
    """Some turns of the event loop in which nothing comes."""
    for _ in range(4):
        await asyncio.sleep(0)


def come(engine, count=1, length=4):
    """So many callers who come in this turn."""
    callers = []
    for _ in range(count):
        request = ForwardRequest(query=X[:, :length])
        module = engine.library.get("m")
        job = forward.prepare(module, request, engine.device, engine.budget.room)
        assert engine.budget.take(job.plan.peak_bytes)
        callers.append(Caller())
        engine.execution.begin(job, callers[-1])
    return callers


def test_alone_it_is_answered_before_it_is_waited_for(play):
    async def story(engine):
        for _ in range(3):
            (caller,) = come(engine)
            assert caller.done()
            assert caller.ended.batch == 1
            await pause()
            assert engine.execution.came_before == 1

    play(story)


def test_in_company_they_wait_for_the_end_of_the_turn_and_run_together(play):
    async def story(engine):
        first = come(engine, 3)  # nobody had company before
        assert [caller.done() for caller in first] == [True, False, False]
        await pause()
        assert [caller.ended.batch for caller in first] == [1, 2, 2]
        assert engine.execution.came_before == 3
        second = come(engine, 3)
        assert not any(caller.done() for caller in second)
        await pause()
        assert [caller.ended.batch for caller in second] == [3, 3, 3]
        expected = second[0].ended.fields["output"]
        for caller in first + second:
            np.testing.assert_allclose(caller.ended.fields["output"], expected, rtol=1e-5, atol=1e-6)

    play(story)


def test_who_had_company_and_has_none_waits_once_more(play):
    async def story(engine):
        come(engine, 2)
        await pause()
        (caller,) = come(engine)
        assert not caller.done()
        await pause()
        assert caller.done()
        assert engine.execution.came_before == 1
        (caller,) = come(engine)
        assert caller.done()

    play(story)


def test_turns_in_which_nobody_comes_change_nothing(play):
    async def story(engine):
        come(engine, 2)
        for _ in range(3):
            await pause()
        assert engine.execution.came_before == 2

    play(story)


def test_who_goes_away_meanwhile_is_not_computed_for(play):
    async def story(engine):
        come(engine, 2)
        await pause()
        kept, gone = come(engine, 2)
        gone.ended = "gone"
        await pause()
        assert gone.ended == "gone"
        assert kept.ended.batch == 1

    play(story)


def test_nothing_runs_at_once_while_the_device_is_busy(play):
    async def story(engine):
        engine.execution.hold_s = 0.0  # it goes to the device's thread
        (first,) = come(engine)
        engine.execution.hold_s = 1.0
        assert not first.done()
        (second,) = come(engine)
        assert not second.done()
        while not second.done():
            await asyncio.sleep(0.001)
        assert first.ended.batch == second.ended.batch == 1

    play(story)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_plans_of_equal_requests_are_made_once_for_each_size_of_their_bytes(play, dtype):
    async def story(engine):
        more = []
        for sent in (np.float32, dtype, np.float32):
            requests = [ForwardRequest(query=X.astype(sent), key=X.astype(dtype)) for _ in range(4)]
            jobs = [forward.prepare(engine.library.get("m"), each, engine.device, 2**40) for each in requests]
            batch = choose([job.part for job in jobs], engine.execution.joining, 2**40)
            assert len(batch.parts) == 4
            alone = jobs[0].part.kind.plan(Size(4, (4, 4)))
            copied = sum(array.nbytes for job in jobs for array in job.part.bound.arrays.values())
            more.append(batch.plan.peak_bytes - alone.peak_bytes - copied)
        assert more == [0, 0, 0]

    play(story)

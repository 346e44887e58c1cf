"""Lanes: short work beside long work, cancellation of running work, and the memory that it gives back."""

import asyncio
import time

import numpy as np
import pytest
import torch

from attention_contract.schemas.attention import RawForwardRequest
from attention_contract.schemas.gradients import RawGradientsRequest
from attention_service.cost import Rates, Roofline
from attention_service.engine import Engine
from attention_service.engine_settings import EngineSettings
from attention_service.runtime.callers import Caller, caller
from attention_service.runtime.device.torch_device import Device

LARGE = RawForwardRequest(query=np.zeros((1, 8, 20_000, 64), np.float32))
TINY = RawForwardRequest(query=np.ones((1, 2, 4, 8), np.float32))
GIVEN_UP = {
    "forward": LARGE,
    "blocked": LARGE.model_copy(update={"kernel": "blocked"}),
    "gradients": RawGradientsRequest(query=LARGE.query, wrt=["query"]),
    "approximate": RawForwardRequest(
        query=np.zeros((1, 8, 200_000, 64), np.float32), spec={"method": {"name": "linear"}}
    ),
}


@pytest.fixture
def engine(tmp_path):
    """An engine that has not started, on a device whose rates are known."""
    torch.set_num_threads(1)
    rates = Rates(flops_per_s=5e10, bytes_per_s=1e10, overhead_s=5e-5)
    return Engine(
        tmp_path,
        Device(torch.device("cpu"), "test", 2**36, Roofline(rates)),
        EngineSettings(memory_budget=2**34, learns_times=False),
    )


def ask(engine, request):
    return asyncio.create_task(
        engine.ask("gradients", None, request)
        if isinstance(request, RawGradientsRequest)
        else engine.forward(None, request)
    )


async def begun(engine):
    """Wait until a pass runs on the thread of long work, and has computed for a moment."""
    while engine.executor._long.running is None:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.2)


@pytest.mark.sampled(request_=2)
@pytest.mark.parametrize("request_", GIVEN_UP.values(), ids=GIVEN_UP)
async def test_work_stops_when_its_caller_leaves_and_its_memory_is_given_back(engine, request_):
    await engine.start()
    large = ask(engine, request_)
    await begun(engine)
    assert engine.budget.in_flight > 0
    large.cancel()
    since = time.monotonic()
    while engine.budget.in_flight:
        await asyncio.sleep(0.005)
        assert time.monotonic() - since < 30  # a tenth of a second on a machine that does nothing else
    assert (await engine.forward(None, TINY)).output.shape == (1, 2, 4, 8)
    await engine.stop()


async def test_the_caller_of_a_pass_that_was_given_up_by_another_gets_its_own_answer(engine):
    """Two long requests wait for one lane; the first leaves, the second is answered."""
    await engine.start()
    first = ask(engine, LARGE)
    await begun(engine)
    second = ask(engine, RawForwardRequest(query=np.zeros((1, 1, 8_000, 64), np.float32)))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).output.shape == (1, 1, 8_000, 64)
    await engine.stop()


async def test_callers_get_equal_shares_of_a_lane(engine):
    """One caller asks eight times before another asks twice; the answers to the other come among the first."""
    medium, ended = RawForwardRequest(query=np.zeros((1, 1, 3_000, 64), np.float32)), []

    async def as_caller(name):
        caller.set(Caller(name))
        await engine.forward(None, medium)
        ended.append(name)

    await engine.start()
    first = ask(engine, LARGE)  # fills the lane while the others come
    await begun(engine)
    tasks = [asyncio.create_task(as_caller(name)) for name in ["many"] * 8 + ["few"] * 2]
    while len(engine.executor._long.waiting) < 10:
        await asyncio.sleep(0.001)
    first.cancel()
    await asyncio.gather(*tasks)
    await engine.stop()
    assert "few" in ended[:2]
    assert ended[:4].count("few") == 2

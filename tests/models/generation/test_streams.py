"""Streams of events from a model, as the engine gives them to a door."""

import asyncio
from contextlib import aclosing

import pytest
import torch

from attention_contract.errors import ModelNotFound
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.engine import Engine
from attention_service.engine_settings import EngineSettings
from attention_service.runtime.device.torch_device import Device

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")


async def started(repository):
    engine = Engine(repository, await asyncio.to_thread(Device.open, "cpu", 1), EngineSettings(learns_times=False))
    await engine.start()
    return engine


async def test_events_come_in_order_and_a_stream_that_is_closed_stops(stand_ins, repository):
    engine = await started(repository)
    try:
        request = ModelForwardRequest(text="100")
        async with aclosing(engine.models.stream("one", "count", request)) as events:
            assert [int(bytes(event)) async for event in events] == list(range(100))
        endless = engine.models.stream("one", "count", ModelForwardRequest(text="1000000000"))
        async with aclosing(endless) as events:
            assert bytes(await anext(events)) == b"0"
        async with asyncio.timeout(5):
            async with aclosing(engine.models.stream("one", "count", request)) as events:
                assert len([event async for event in events]) == 100
        with pytest.raises(ModelNotFound):
            await anext(engine.models.stream("nobody", "count", request))
        assert engine.budget.in_flight == 0
    finally:
        await engine.stop()
    assert torch.get_num_threads() == 1

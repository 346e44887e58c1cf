"""What a model has said and its caller has not read counts as a reply, within the limit of replies."""

import asyncio
from contextlib import aclosing

import pytest

from attention_contract.errors import NoRoom
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.engine import Engine
from attention_service.engine_settings import EngineSettings
from attention_service.models.server.unread_events import UnreadEvents
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.scheduling.budget import UNCOUNTED, Budget

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
KIB = 2**10


def event(size):
    return memoryview(bytes(size))


async def test_events_count_from_their_coming_until_they_are_sent():
    budget = Budget(1000 * KIB, 2**40, lambda: 0, 4)
    events = UnreadEvents(budget)
    events.put(event(UNCOUNTED))
    assert budget.replies == 0
    events.put(event(50 * KIB))
    assert budget.replies == UNCOUNTED + 50 * KIB
    assert budget.available == (1000 - 50) * KIB - UNCOUNTED
    await events.get()
    assert budget.replies == UNCOUNTED + 50 * KIB  # the first is being sent
    await events.get()
    assert budget.replies == 50 * KIB
    events.end()
    assert await events.get() is None
    assert budget.replies == 0
    events.put(event(100 * KIB))
    events.close()
    assert budget.replies == 0


async def test_slow_readers_take_half_of_the_memory_and_quick_ones_go_on():
    budget = Budget(1000 * KIB, 2**40, lambda: 0, 4)
    slow, other, quick = (UnreadEvents(budget) for _ in range(3))
    slow.put(event(900 * KIB))  # one reply is never too large: what computed it was
    with pytest.raises(NoRoom) as refused:
        other.put(event(100 * KIB))
    assert refused.value.facts["limit_bytes"] == 500 * KIB
    for _ in range(100):
        quick.put(event(UNCOUNTED // 2))
        await quick.get()
    slow.close()
    other.put(event(100 * KIB))
    assert budget.replies == 100 * KIB


async def test_memory_that_is_read_goes_to_those_who_wait():
    budget = Budget(1000 * KIB, 2**40, lambda: 0, 4)
    events = UnreadEvents(budget)
    events.put(event(500 * KIB))
    waiting = asyncio.create_task(budget.acquire(800 * KIB))
    await asyncio.sleep(0)
    events.close()
    await asyncio.wait_for(waiting, 60)


async def test_a_stream_holds_what_its_reader_has_not_taken(stand_ins, repository):
    """A generation that finds no more room stops, and its caller is told; the next one runs."""
    device = await asyncio.to_thread(Device.open, "cpu", 1)
    engine = Engine(repository, device, EngineSettings(memory_budget=2**30, learns_times=False))
    await engine.start()
    try:
        budget, size = engine.budget, 2**20
        slow = engine.models.stream("one", "count", ModelForwardRequest(text=f"20 {size}"))
        async with aclosing(slow):
            await anext(slow)
            async with asyncio.timeout(60):
                while budget.replies < 20 * size or budget.in_flight:
                    await asyncio.sleep(0.01)
            assert budget.replies == 20 * size
            free = budget.available
            await anext(slow)
            assert budget.available == free + size
            endless = engine.models.stream("one", "count", ModelForwardRequest(text=f"1000000 {size}"))
            async with aclosing(endless):
                await anext(endless)
                async with asyncio.timeout(60):
                    while budget.refused[NoRoom.code] == 0 or budget.in_flight:
                        await asyncio.sleep(0.01)
                assert budget.replies <= budget.capacity // 2
                with pytest.raises(NoRoom):
                    async for _ in endless:
                        pass
            assert [len(each) async for each in slow] == 18 * [size]
        assert (budget.replies, budget.in_flight) == (0, 0)
    finally:
        await engine.stop()

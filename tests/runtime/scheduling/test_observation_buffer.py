"""What is noted is seen to a moment later, in its order, once."""

import asyncio

import pytest
from tests.fake_clock import FAKE_CLOCK

from attention_service.runtime.request_timing import AFTER_S, Later


@pytest.fixture
def anyio_backend():
    return FAKE_CLOCK


async def test_it_waits_a_moment_and_comes_all_at_once():
    seen = []
    noted = Later(seen.append)
    for each in range(3):
        noted.note(each)
    await asyncio.sleep(0)
    assert seen == []
    await asyncio.sleep(2 * AFTER_S)
    assert seen == [[0, 1, 2]]
    noted.note(3)
    await asyncio.sleep(2 * AFTER_S)
    assert seen == [[0, 1, 2], [3]]


async def test_who_asks_does_not_wait_and_nothing_is_seen_to_twice():
    seen = []
    noted = Later(seen.append)
    noted.settle()
    assert seen == []
    noted.note("a")
    noted.settle()
    noted.settle()
    assert seen == [["a"]]
    noted.note("b")
    await asyncio.sleep(2 * AFTER_S)
    assert seen == [["a"], ["b"]]


async def test_what_is_noted_meanwhile_is_seen_to_next():
    seen = []

    def see_to(each):
        seen.append(each)
        if len(seen) == 1:
            noted.note("more")

    noted = Later(see_to)
    noted.note("first")
    while len(seen) < 2:
        await asyncio.sleep(0.01)
    await asyncio.sleep(2 * AFTER_S)
    assert seen == [["first"], ["more"]]

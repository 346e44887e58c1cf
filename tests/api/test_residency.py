"""Freed memory goes back to the system when the process holds more than its budget, and only then."""

import asyncio
import threading
from types import SimpleNamespace

from attention_contract.errors import NoRoom
from attention_service.api import residency
from attention_service.api.residency import Unused, keep_within_budget, resident_bytes
from attention_service.runtime.device.freed_memory import MUCH
from attention_service.runtime.scheduling.budget import Budget


def _is_here():
    """False in the thread of a server that other tests started, whose watch goes on."""
    return threading.current_thread() is threading.main_thread()


async def test_memory_is_given_back_only_beyond_the_budget(monkeypatch):
    held, given = [1000, 1500, 1600, 1601, 1200, 1600], []
    monkeypatch.setattr(residency, "_LOOK_S", 0)
    monkeypatch.setattr(residency, "to_tick", lambda: 0)
    monkeypatch.setattr(residency, "_LITTLE", 0)
    monkeypatch.setattr(residency, "resident_bytes", lambda: held.pop(0) if _is_here() else 0)
    monkeypatch.setattr(residency, "give_back_freed_memory", lambda: given.append(len(held)))
    budget = Budget(700, 2**40, lambda: 100, 4)
    engine = SimpleNamespace(library=SimpleNamespace(resident_bytes=100), budget=budget, host=budget)
    watching = asyncio.create_task(keep_within_budget(engine))
    while held:
        await asyncio.sleep(0.001)
    watching.cancel()
    assert given == [2]  # after 1601, which is more than 900 of its own and 700 of the budget


async def test_far_beyond_the_budget_no_work_begins_until_the_memory_is_back(monkeypatch):
    held, cleared, seen = [1000], [], []
    monkeypatch.setattr(residency, "_LOOK_S", 0)
    monkeypatch.setattr(residency, "to_tick", lambda: 0)
    monkeypatch.setattr(residency, "_TOLERATED_BYTES", 100)
    monkeypatch.setattr(residency, "resident_bytes", lambda: held[-1])
    monkeypatch.setattr(residency, "give_back_freed_memory", lambda: None)
    monkeypatch.setattr(residency, "_REST_S", 0)
    budget = Budget(800, 2**40, lambda: 0, 4)
    engine = SimpleNamespace(
        library=SimpleNamespace(resident_bytes=0),
        budget=budget,
        host=budget,
        passes=SimpleNamespace(clear=lambda: cleared.append(1)),
    )
    watching = asyncio.create_task(keep_within_budget(engine))
    await asyncio.sleep(0.01)
    for bytes_held in (1900, 2001, 1901, 1899):  # of its own 1000, of the budget 800, tolerated 200
        held.append(bytes_held)
        for _ in range(50):
            await asyncio.sleep(0.001)
        seen.append((budget.exceeded, budget.is_full, budget.take(1)))
    watching.cancel()
    assert seen == [(0, False, True), (201, True, False), (101, True, False), (0, False, True)]
    assert cleared
    budget.exceeded = 7
    assert isinstance(budget.crowded(), NoRoom)


def test_memory_that_nobody_used_for_a_while_goes_back():
    """After a burst, although the process never exceeded its budget."""
    unused, rest = Unused(MUCH), residency._REST_S
    assert not any(unused.is_due(5 * MUCH, 4 * MUCH, now) for now in (0, rest, 2 * rest))  # requests run
    assert not unused.is_due(5 * MUCH, 0, 2 * rest + 1)  # the next may come soon
    assert not unused.is_due(5 * MUCH, 4 * MUCH, 2 * rest + 2)  # it came
    assert not unused.is_due(5 * MUCH, 0, 3 * rest)
    assert unused.is_due(5 * MUCH, 0, 4 * rest)
    unused.went_back(3 * MUCH)  # modules that have come to stay
    assert not any(unused.is_due(4 * MUCH, 0, now) for now in (5 * rest, 7 * rest))
    assert not unused.is_due(2 * MUCH, 0, 8 * rest)  # they were deleted
    assert not unused.is_due(4 * MUCH, 0, 9 * rest)
    assert unused.is_due(4 * MUCH, 0, 10 * rest)


async def test_the_server_gives_it_back(monkeypatch):
    given = []
    monkeypatch.setattr(residency, "_LOOK_S", 0)
    monkeypatch.setattr(residency, "to_tick", lambda: 0)
    monkeypatch.setattr(residency, "_REST_S", 0)
    monkeypatch.setattr(residency, "resident_bytes", lambda: held.pop() if _is_here() and len(held) > 1 else MUCH)
    monkeypatch.setattr(residency, "give_back_freed_memory", lambda: given.append(1))
    held = [MUCH, 3 * MUCH, MUCH, MUCH]
    budget = Budget(100 * MUCH, 2**60, lambda: 0, 4)
    engine = SimpleNamespace(library=SimpleNamespace(resident_bytes=0), budget=budget, host=budget)
    watching = asyncio.create_task(keep_within_budget(engine))
    while not given:
        await asyncio.sleep(0.001)
    watching.cancel()


def test_resident_memory_is_known_here():
    assert 2**24 < resident_bytes() < 2**40

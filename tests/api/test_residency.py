"""Freed memory goes back to the system when the process holds more than its budget, and only then."""

import asyncio
from types import SimpleNamespace

from attention_service.api import residency
from attention_service.api.residency import keep_within_budget, resident_bytes


def test_memory_is_given_back_only_beyond_the_budget(monkeypatch):
    held, given = [1000, 1500, 1600, 1601, 1200, 1600], []
    monkeypatch.setattr(residency, "_LOOK_S", 0)
    monkeypatch.setattr(residency, "_LITTLE", 0)
    monkeypatch.setattr(residency, "resident_bytes", lambda: held.pop(0))
    monkeypatch.setattr(residency, "give_back_freed_memory", lambda: given.append(len(held)))
    engine = SimpleNamespace(library=SimpleNamespace(resident_bytes=100), budget=SimpleNamespace(total=700))

    async def play():
        watching = asyncio.create_task(keep_within_budget(engine))
        while held:
            await asyncio.sleep(0.001)
        watching.cancel()

    asyncio.run(play())
    assert given == [2]  # after 1601, which is more than 900 of its own and 700 of the budget


def test_resident_memory_is_known_here():
    assert 2**24 < resident_bytes() < 2**40

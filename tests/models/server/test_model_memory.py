"""The memory of models has one owner: its counts follow each event, and it frees what requests need."""

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.models.server.process_double import FOLDER, ProcessDouble

from attention_contract.errors import NeverFits, OverBudget
from attention_service.models.server import resident_model
from attention_service.models.server.model_environment import ModelEnvironment
from attention_service.models.server.model_memory import MemoryShare, ModelMemory
from attention_service.models.server.model_question import Question
from attention_service.models.server.resident_model import ResidentModel
from attention_service.runtime.scheduling.budget import Budget


def make(total=100):
    memory = ModelMemory(Budget(total, total, lambda: memory.bytes, 8))
    return memory, memory.budget


class Process:
    """A process that ends when the test says so."""

    def __init__(self, memory, own, **more):
        self.share = MemoryShare(memory, self.give_way, lambda: self.share.keep(0), **more)
        self.share.hold(own)
        self.given_way = 0

    def give_way(self):
        self.given_way += 1


def test_the_counts_are_those_of_a_count_anew_after_any_events():
    chance = random.Random(0)
    memory, budget = make()
    processes, uses = [Process(memory, 0) for _ in range(4)], []
    for _ in range(500):
        share = chance.choice(processes).share
        match chance.randrange(6):
            case 0:
                share.hold(chance.randrange(20))
            case 1:
                share.keep(chance.randrange(5))
            case 2:
                uses.append(share.in_use())
                uses[-1].__enter__()
            case 3 if uses:
                uses.pop(chance.randrange(len(uses))).__exit__(None, None, None)
            case 4:
                share.end()
            case 5:
                share.drop()
        shares = [each.share for each in processes]
        assert memory.bytes == sum(each.own + each.kept for each in shares)
        assert memory.reclaimable == sum(
            each.own + each.kept if each.ends or not each._users else each.kept for each in shares
        )
        assert budget.capacity == 100 - memory.used


def test_kept_memory_gives_way_then_what_is_first_then_the_least_recently_used():
    memory, _ = make()
    old, new = Process(memory, 20), Process(memory, 20)
    spare = Process(memory, 10, first=True)
    for each in (old, new, spare):
        with each.share.in_use():
            pass
    old.share.keep(5)
    memory.reclaim(5)
    assert (old.share.kept, spare.given_way) == (0, 0)
    memory.reclaim(5)
    assert (spare.given_way, old.given_way) == (1, 0)
    memory.reclaim(15)  # 10 of which come by themselves
    assert (spare.given_way, old.given_way, new.given_way) == (1, 1, 0)


async def test_who_waits_for_a_process_that_ends_is_not_refused_meanwhile():
    memory, budget = make()
    process, beside = Process(memory, 80), 10
    assert budget.take(beside)
    waiting = asyncio.create_task(budget.acquire(90))
    await asyncio.sleep(0)
    assert process.given_way == 1
    budget.release(beside)  # wakes those who wait, while the process has not ended yet
    await asyncio.sleep(0)
    assert not waiting.done()
    process.share.drop()
    await waiting


async def test_more_gives_way_if_what_was_freed_went_to_others():
    modules = 0
    memory = ModelMemory(Budget(100, 100, lambda: memory.bytes + modules, 8))
    first, second = Process(memory, 40), Process(memory, 40)
    waiting = asyncio.create_task(memory.budget.acquire(60))
    await asyncio.sleep(0)
    assert (first.given_way, second.given_way) == (1, 0)
    modules = 20
    first.share.drop()
    assert second.given_way == 1
    second.share.drop()
    await waiting


async def test_a_model_that_is_larger_than_a_gpu_is_loaded_over_two(monkeypatch):
    monkeypatch.setattr(resident_model, "WorkerProcess", ProcessDouble)
    folder = replace(FOLDER, tensor_bytes=2**40, file_bytes=2**40)
    memory, budget = make(int(0.6 * folder.loading_bytes("float32")))
    device = SimpleNamespace(is_cuda=True, place="cuda:0", threads=0, give_back_cached=lambda _: None)
    environment = ModelEnvironment(device, memory, 60, 60)
    with pytest.raises((NeverFits, OverBudget)):
        await ResidentModel("one", folder, "float32", environment).ask(Question())
    model = ResidentModel("two", folder, "float32", environment, devices=["cuda:0", "cuda:1"])
    await model.ask(Question())
    assert memory.bytes == folder.resident_bytes("float32", 2, apart=True) < budget.total
    await model.stop()
    assert (memory.bytes, budget.in_flight) == (0, 0)

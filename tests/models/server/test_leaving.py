"""A caller may leave, or the server stop, in each turn of the event loop: no byte of the budget stays taken."""

import asyncio
import itertools
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from attention_contract.errors import Draining, ModelEnded
from attention_service.models.model_catalogue import ModelFolder
from attention_service.models.server import resident_model
from attention_service.models.server.exchange import Exchange
from attention_service.models.server.model_environment import ModelEnvironment
from attention_service.models.server.model_memory import ModelMemory
from attention_service.models.server.model_question import Question
from attention_service.models.server.reply_memories import ReplyMemories
from attention_service.models.server.resident_model import ResidentModel
from attention_service.models.server.worker_process import WorkerProcess
from attention_service.models.worker_messages import Message
from attention_service.runtime.scheduling.budget import Budget

FOLDER = ModelFolder("one", Path("one"), {}, 0, 0, "float32", None)
TURNS = 60
"""More turns than anything here takes."""


class Told(WorkerProcess):
    """A process that answers in the same turn; a request tells of its memory twice, as one with images does."""

    def __init__(self):
        self.limit = self._own_bytes = self._idle_s = self._waiters = 0
        self._awaited = asyncio.Event()
        self.ended = asyncio.get_running_loop().create_future()
        self.memories = ReplyMemories([])
        self._numbers, self._exchanges, self._loading = itertools.count(1), {}, Exchange(self, 0)
        self._needs = {}

    @classmethod
    async def start(cls, *_, **__):
        await asyncio.sleep(0)
        return cls()

    async def send(self, kind, facts, _=()):
        number = facts.get("request")
        if kind == "load":
            self._tell("progress", share=0.5)
            self._tell("loaded", held_bytes=None)
        elif kind == "ask":
            self._needs[number] = [30, 20, 10]
            self._tell("need", request=number, bytes=10)
        elif number in self._needs:  # others come too late
            self._needs[number] = self._needs[number][:-1] if kind == "go" else []
            if self._needs[number]:
                self._tell("need", request=number, bytes=self._needs[number][-1])
            else:
                del self._needs[number]
                self._tell("done", request=number, held_bytes=None)
        await asyncio.sleep(0)

    def _tell(self, kind, **facts):
        self._take_in(Message(kind, facts, memoryview(b"")))

    async def end(self):
        await asyncio.sleep(0)

    async def fault(self):
        return ModelEnded("killed")

    def kill(self):
        if not self.ended.done():
            self._take_in(None)


async def turns(number):
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.fixture(params=[False, True], ids=["CPU", "GPU"])
def environment(request, monkeypatch):
    monkeypatch.setattr(resident_model, "WorkerProcess", Told)
    monkeypatch.setattr(asyncio, "to_thread", lambda *_: turns(2))  # as long in each run
    device = SimpleNamespace(is_cuda=request.param, place="somewhere", threads=1, give_back_cached=None)
    total = 2 * FOLDER.loading_bytes("float32")
    memory = ModelMemory(Budget(total, total, lambda: memory.bytes, 8))
    return ModelEnvironment(device, memory, 60, 60)


async def _leave_after(environment, leave, later, *, crowded_for, warm):
    """Leave after so many turns. Returns False if the answer came first."""
    budget, model = environment.budget, ResidentModel("one", FOLDER, "float32", environment)
    if warm:
        await model.ask(Question())
    taken = budget.available if crowded_for else 0
    if crowded_for:
        assert budget.take(taken)
    asking = asyncio.create_task(model.ask(Question("forward")))
    freed = False
    for turn in range(later):
        if crowded_for and turn == crowded_for:
            budget.release(taken)
            freed = True
        await asyncio.sleep(0)
    came_first = asking.done()
    leaving = asyncio.create_task(leave(model, asking))
    await turns(TURNS)
    if crowded_for and not freed:
        budget.release(taken)
    await turns(TURNS)
    assert leaving.done()
    assert asking.done()
    if not asking.cancelled():
        assert isinstance(asking.exception(), Draining | None)
    assert (budget.in_flight, budget.waiting) == (0, 0), (later, crowded_for)
    assert budget.take(budget.available)  # so that not even their number is off
    assert budget.waiting == 0
    budget.release(budget.in_flight)
    await model.stop()
    assert (budget.in_flight, environment.memory.bytes) == (0, 0)
    return not came_first


async def cancelled(_, asking):
    asking.cancel()


async def stopped(model, _):
    await model.stop()


async def unloaded(model, asking):
    model.leave()
    asking.cancel()


@pytest.mark.parametrize("leave", [cancelled, stopped, unloaded])
@pytest.mark.parametrize("warm", [False, True], ids=["loading", "resident"])
async def test_nothing_stays_taken_whenever_somebody_leaves(environment, leave, warm):
    for later in count():
        if not await _leave_after(environment, leave, later, crowded_for=0, warm=warm):
            break
    assert later > 5
    for crowded_for in range(1, later):
        for moment in (-1, 0, 1, 2, 3):
            await _leave_after(environment, leave, max(crowded_for + moment, 0), crowded_for=crowded_for, warm=warm)

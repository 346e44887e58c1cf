"""A caller may leave, or the server stop, in each turn of the event loop: no byte of the budget stays taken."""

import asyncio
from itertools import count
from types import SimpleNamespace

import pytest
from tests.models.server.process_double import FOLDER, ProcessDouble, turns

from attention_contract.errors import Draining, ModelEnded
from attention_service.models.server import resident_model
from attention_service.models.server.model_environment import ModelEnvironment
from attention_service.models.server.model_memory import ModelMemory
from attention_service.models.server.model_question import Question
from attention_service.models.server.resident_model import ResidentModel
from attention_service.runtime.scheduling.budget import Budget

TURNS = 60
"""More turns than anything here takes."""


@pytest.fixture(params=[False, True], ids=["CPU", "GPU"])
def environment(request, monkeypatch):
    monkeypatch.setattr(resident_model, "WorkerProcess", ProcessDouble)
    monkeypatch.setattr(asyncio, "to_thread", lambda *_: turns(2))  # as long in each run
    device = SimpleNamespace(is_cuda=request.param, place="somewhere", threads=1, give_back_cached=None)
    total = 2 * FOLDER.loading_bytes("float32")
    memory = ModelMemory(Budget(total, total, lambda: memory.bytes, 8))
    return ModelEnvironment(device, memory, 60, 60)


async def _leave_after(environment, leave, later, *, crowded_for, warm, beside=0):
    """Leave after so many turns, while others ask ``beside`` it. Returns False if the answer came first."""
    budget, model = environment.budget, ResidentModel("one", FOLDER, "float32", environment)
    if warm:
        await model.ask(Question())
    taken = budget.available if crowded_for else 0
    if crowded_for:
        assert budget.take(taken)
    others = [asyncio.create_task(model.ask(Question("forward", caller=str(each)))) for each in range(beside)]
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
        assert isinstance(asking.exception(), Draining | ModelEnded | None)
    for other in others:
        assert other.done()
        expected = {stopped: Draining, killed: ModelEnded}.get(leave, type(None))
        assert isinstance(other.exception(), expected | None)
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


async def killed(model, asking):
    if model._worker is not None:
        model._worker.kill()


@pytest.mark.parametrize("leave", [cancelled, stopped, unloaded, killed])
@pytest.mark.parametrize("beside", [1, 3])
async def test_those_beside_get_their_answers_whenever_somebody_leaves(environment, leave, beside):
    for later in count():
        if not await _leave_after(environment, leave, later, crowded_for=0, warm=True, beside=beside):
            break
        await _leave_after(environment, leave, later, crowded_for=max(later - 2, 1), warm=True, beside=beside)
    assert later > 5


@pytest.mark.sampled
@pytest.mark.parametrize("leave", [cancelled, stopped, unloaded, killed])
@pytest.mark.parametrize("warm", [False, True], ids=["loading", "resident"])
async def test_nothing_stays_taken_whenever_somebody_leaves(environment, leave, warm):
    for later in count():
        if not await _leave_after(environment, leave, later, crowded_for=0, warm=warm):
            break
    assert later > 5
    for crowded_for in range(1, later):
        for moment in (-1, 0, 1, 2, 3):
            await _leave_after(environment, leave, max(crowded_for + moment, 0), crowded_for=crowded_for, warm=warm)

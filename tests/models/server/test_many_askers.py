"""A process has several requests at once: shares of callers, cancellation of one, silence, and its death under all."""

import asyncio
import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from tests.conftest import eventually
from tests.models.server.process_double import FOLDER, ProcessDouble

from attention_contract.errors import ModelEnded
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.schemas.openai import ChatCompletionRequest, CompletionRequest
from attention_service.models.server import model_queue, resident_model, worker_process
from attention_service.models.server.model_environment import ModelEnvironment
from attention_service.models.server.model_memory import ModelMemory
from attention_service.models.server.model_question import Question
from attention_service.models.server.model_service import cost_of
from attention_service.models.server.resident_model import ResidentModel
from attention_service.models.worker_messages import WorkerMessage
from attention_service.runtime.scheduling.budget import Budget

pytestmark = [pytest.mark.filterwarnings("ignore:os.fork"), pytest.mark.long]
RUNNING, HALF = model_queue.RUNNING, model_queue.OF_ONE


class Holding(ProcessDouble):
    """A process whose requests end when the test says so."""

    holds = True


@pytest.fixture
async def model(monkeypatch):
    monkeypatch.setattr(resident_model, "WorkerProcess", Holding)
    total = 2 * FOLDER.loading_bytes("float32")
    memory = ModelMemory(Budget(total, total, lambda: memory.bytes, 256))
    device = SimpleNamespace(is_cuda=False, place="somewhere", threads=1)
    made = ResidentModel("one", FOLDER, "float32", ModelEnvironment(device, memory, 60, 60))
    await made.ask(Question())
    yield made
    await made.stop()
    assert (memory.bytes, memory.budget.in_flight) == (0, 0)


async def ask(model, count, caller="a", **more):
    asking = [asyncio.create_task(model.ask(Question("forward", caller=caller, **more))) for _ in range(count)]
    await settle()
    return asking


async def settle():
    for _ in range(60):
        await asyncio.sleep(0)


def numbers(model):
    """The requests that run and wait, as ``GET /v1/models/{model}`` has them."""
    info = model.info()
    return info.running, info.waiting


async def finish(model, count):
    for number in model._worker.admitted[:count]:
        model._worker.finish(number)
    await settle()


async def test_one_caller_has_all_places_until_another_comes_who_has_half_as_many_beyond_them(model):
    first = await ask(model, RUNNING + 20, "a")
    assert numbers(model) == (RUNNING, 20)
    second = await ask(model, HALF + 1, "b")
    assert numbers(model) == (RUNNING + HALF, 20 + 1)
    third = await ask(model, 1, "c")
    await finish(model, 1)
    assert Counter(each.caller for each in model._queue._running) == {"a": RUNNING - 1, "b": HALF, "c": 1}
    await finish(model, HALF)
    assert numbers(model) == (RUNNING + 1, 19 + 1)
    assert Counter(each.caller for each in model._queue._running) == {"a": HALF, "b": HALF, "c": 1}
    second += third
    while model.info().running:
        await finish(model, RUNNING)
    assert all(each.done() and each.exception() is None for each in first + second)


async def test_dear_requests_let_cheap_ones_of_others_go_first(model):
    await ask(model, RUNNING, "a")
    await ask(model, HALF, "d")
    dear = await ask(model, 4, "b", cost=100.0)
    cheap = await ask(model, 4, "c")
    await finish(model, 5)
    waiting = [each.caller for each in model._queue.waiting]
    assert waiting.count("c") == 0
    assert waiting.count("b") == 3
    model._worker.holds = False
    while model.info().running:
        await finish(model, RUNNING)
    await asyncio.gather(*dear, *cheap)


async def test_one_of_several_is_cancelled_alone(model):
    asking = await ask(model, 5)
    asking[2].cancel()
    await settle()
    assert asking[2].cancelled()
    assert numbers(model) == (4, 0)
    await finish(model, 4)
    assert all(each.done() for each in asking)


async def test_a_request_that_waits_for_memory_can_leave_and_does_not_hold_up_those_that_run(model):
    running = await ask(model, 3)
    budget = model._environment.budget
    taken = budget.available - 5
    assert budget.take(taken)
    (waiting,) = await ask(model, 1)
    assert len(model._worker.admitted) == 3
    await finish(model, 1)
    assert [each.done() for each in running] == [True, False, False]
    waiting.cancel()
    await settle()
    assert numbers(model) == (2, 0)
    budget.release(taken)
    await finish(model, 2)
    assert budget.in_flight == 0


async def test_a_process_that_dies_fails_what_ran_and_what_did_not_is_sent_again(model):
    running = await ask(model, 3)
    budget = model._environment.budget
    taken = budget.available - 5
    assert budget.take(taken)
    waiting = await ask(model, 2)
    budget_needs = len(model._worker.admitted)
    model._worker.kill()
    await settle()
    budget.release(taken)
    await settle()
    assert budget_needs == 3
    assert [type(each.exception()) for each in running] == 3 * [ModelEnded]
    await finish(model, 2)
    assert [each.done() and each.exception() for each in waiting] == [None, None]
    assert model._environment.counts["deaths"] == 1


async def test_a_process_is_ended_only_for_silence_beyond_its_announced_pass(monkeypatch):
    monkeypatch.setattr(worker_process, "STOP_S", 0.1)
    worker = ProcessDouble()
    worker._take_in(WorkerMessage("pass", {"seconds": 2.0}, memoryview(b"")))
    began = time.monotonic()
    ending = asyncio.create_task(worker.kill_if_silent())
    await asyncio.sleep(0.2)
    assert worker.is_alive
    for _ in range(6):  # of other requests
        worker._take_in(WorkerMessage("event", {"request": 7}, memoryview(b"")))
        await asyncio.sleep(0.03)
    assert worker.is_alive
    await ending
    assert not worker.is_alive
    assert time.monotonic() - began >= 2.1


def test_a_generation_costs_more_the_longer_it_may_be():
    assert cost_of(ModelForwardRequest(text="a")) == 1
    assert cost_of(CompletionRequest(model="one", prompt="a")) == 1 + 16 / 64
    assert cost_of(CompletionRequest(model="one", prompt=[1, 2, 3], max_tokens=64)) == 2
    assert cost_of(CompletionRequest(model="one", prompt=["a", "b"], max_tokens=64, n=3)) == 12
    messages = [{"role": "user", "content": "a"}]
    assert cost_of(ChatCompletionRequest(model="one", messages=messages, max_completion_tokens=128)) == 3
    assert cost_of(ChatCompletionRequest(model="one", messages=messages)) == 65


def test_a_process_killed_under_many_callers_gives_each_an_answer_of_their_own(http):
    def forward(text):
        return http.post("/v1/models/one/forward", json={"text": text})

    process = int(forward("a").json()["ran"]["architecture"])
    texts = ["sleep 0.15" + number * " " for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        asking = [pool.submit(forward, text) for text in texts]
        eventually(lambda: http.get("/v1/models/one").json()["running"] > 8)
        os.kill(process, signal.SIGKILL)
        answers = [each.result() for each in asking]
    for text, answer in zip(texts, answers, strict=True):
        if answer.status_code == 200:
            assert answer.json()["labels"]["tokens"] == [text]
        else:
            assert (answer.status_code, answer.json()["code"]) == (503, "model_ended")
    assert 200 in {answer.status_code for answer in answers}  # those that had not begun are asked again
    assert int(forward("b").json()["ran"]["architecture"]) != process
    memory = http.get("/v1").json()["memory"]
    assert memory["in_flight_bytes"] == 0

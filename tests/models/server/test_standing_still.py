"""A model's process that stands still is noticed although no caller has a deadline; one that computes is left alone."""

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from tests.api.talk import post, problem
from tests.conftest import eventually, live_server

from attention_contract.schemas.model_requests import ModelForwardReply, ModelForwardRequest
from attention_contract.tensor_files import from_pieces
from attention_service.engine import Engine
from attention_service.engine_settings import EngineSettings
from attention_service.models.server import worker_process
from attention_service.runtime.device.freed_memory import private_bytes
from attention_service.runtime.device.torch_device import Device

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
PATIENCE_S = 3.0


@pytest.fixture(scope="module")
def http(stand_ins, repository):
    with live_server(repository, stuck_seconds=PATIENCE_S) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def ask(http, text, model="one"):
    return http.post(f"/v1/models/{model}/forward", json={"text": text})


def state(http, name="one"):
    return http.get(f"/v1/models/{name}").json()["state"]


@pytest.mark.long
def test_a_stopped_process_is_reported_ended_and_started_again(http):
    process = int(ask(http, "a").json()["ran"]["architecture"])
    with ThreadPoolExecutor() as threads:
        asking = [threads.submit(ask, http, "sleep 30")]
        eventually(lambda: http.get("/v1").json()["memory"]["in_flight_bytes"] > 0)
        os.kill(process, signal.SIGSTOP)
        asking += [threads.submit(ask, http, str(number)) for number in range(2)]
        unready, now = eventually(
            lambda: (answer := http.get("/health/ready")).status_code == 503 and (answer.json(), state(http))
        )
        assert (unready["code"], now) == ("stuck", "stuck")
        assert "model one" in unready["detail"]
        assert http.get("/health/live").status_code == 200
        answers = [each.result() for each in asking]
    ended = answers[0]
    assert problem(ended)["code"] == "model_ended"
    assert "stuck_seconds" in ended.json()["detail"]
    assert [answer.status_code for answer in answers[1:]] == [200, 200]  # asked again, for they never ran
    assert not psutil.pid_exists(process)
    assert (http.get("/health/ready").status_code, state(http)) == (200, "resident")


@pytest.mark.slow
def test_a_process_that_goes_on_in_time_is_not_ended(http):
    process = int(ask(http, "a").json()["ran"]["architecture"])
    os.kill(process, signal.SIGSTOP)
    with ThreadPoolExecutor() as threads:
        asking = threads.submit(ask, http, "b")
        eventually(lambda: state(http) == "stuck")
        os.kill(process, signal.SIGCONT)
        assert asking.result().json()["ran"]["architecture"] == str(process)
    assert http.get("/health/ready").status_code == 200


@pytest.mark.slow
def test_a_load_that_never_ends_fails(http):
    with ThreadPoolExecutor() as threads:
        loading = threads.submit(http.post, "/v1/models", json={"checkpoint": "stands"})
        eventually(lambda: state(http, "stands") == "stuck")
        assert problem(loading.result())["code"] == "model_ended"
    assert state(http, "stands") == "idle"
    assert http.get("/health/ready").status_code == 200


@pytest.mark.slow
def test_a_long_computation_is_not_ended(http):
    process = ask(http, "a").json()["ran"]["architecture"]
    assert post(http, "/v1/models/one/forward", text=f"compute {1.2 * PATIENCE_S}")["ran"]["architecture"] == process


@pytest.mark.slow
async def test_a_request_that_waits_for_memory_does_not_stand_still(stand_ins, repository):
    device = await asyncio.to_thread(Device.open, "cpu", 1)
    engine = Engine(repository, device, EngineSettings(memory_budget=2**30, stuck_s=0.5, learns_times=False))
    await engine.start()
    try:

        async def ask(text):
            reply = await engine.models.ask("one", "forward", ModelForwardRequest(text=text))
            return from_pieces(reply.pieces, "reply", ModelForwardReply).ran.architecture

        process = await ask("a")
        taken = engine.budget.available
        assert engine.budget.take(taken)
        waiting = asyncio.create_task(ask("needs 10"))
        await asyncio.sleep(1.5)
        engine.models.check_progress()
        engine.budget.release(taken)
        assert await waiting == process
    finally:
        await engine.stop()


@pytest.mark.slow
def test_a_process_is_looked_at_often_only_while_somebody_waits_for_it(http, monkeypatch):
    looks = []
    ask(http, "a")
    time.sleep(0.5)
    monkeypatch.setattr(worker_process, "private_bytes", lambda seen: looks.append(seen) or private_bytes(seen))
    time.sleep(1.0)
    assert len(looks) <= 1
    ask(http, "compute 1")
    assert len(looks) > 3

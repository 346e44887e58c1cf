"""A server whose device is stuck or lost says so to those who watch it, and recovers if the device does."""

import threading
import time

import httpx
import pytest

from attention_contract.errors import Stuck
from attention_service.core.cancellation import Cancellation, cancellable, checkpoint
from attention_service.runtime.operations import forward
from attention_service.runtime.scheduling import jobs, request_runner
from attention_service.runtime.scheduling.executor import Executor
from attention_service.runtime.scheduling.watchdog import Watchdog
from tests.conftest import live_server

BODY = {"query": [[[0.5, 0.25]]], "num_heads": 1}


def until(url, path, status):
    """The first answer with this status."""
    deadline = time.monotonic() + 60
    while (answer := httpx.get(url + path)).status_code != status:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.02)
    return answer


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server that is stuck soon."""
    with live_server(tmp_path_factory.mktemp("stuck"), stuck_seconds=0.3) as url:
        yield url


@pytest.fixture
def threaded(monkeypatch):
    """Nothing runs on the event loop."""
    monkeypatch.setattr(Executor, "_stays", lambda *_: False)


@pytest.mark.usefixtures("threaded")
def test_a_stuck_device_is_not_live_until_it_goes_on(url, monkeypatch):
    real, going_on = jobs.execute, threading.Event()
    monkeypatch.setattr(jobs, "execute", lambda *args: going_on.wait(30) and real(*args))
    answers = []
    asking = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/attention/forward", json=BODY)))
    assert httpx.get(f"{url}/health/live").status_code == 200
    asking.start()
    problem = until(url, "/health/live", 503).json()
    assert problem["code"] == "stuck"
    assert "lane of cpu" in problem["detail"]
    assert httpx.get(f"{url}/health/ready").json()["code"] == "stuck"
    going_on.set()
    asking.join(30)
    assert answers[0].status_code == 200
    assert until(url, "/health/live", 200).json()["status"] == "live"


def test_a_checkpoint_is_progress_and_a_long_prediction_gives_more_time():
    watchdog = Watchdog(0.3)
    cancellation = Cancellation()
    with watchdog.watching("work", cancellation), cancellable(cancellation):
        for _ in range(4):
            time.sleep(0.1)
            checkpoint()
            watchdog.check()
        time.sleep(0.31)
        with pytest.raises(Stuck, match="work has made no progress"):
            watchdog.check()
    watchdog.check()
    with watchdog.watching("long work", Cancellation(), expected_s=10.0):
        time.sleep(0.31)
        watchdog.check()


def test_planning_is_watched_too(url, monkeypatch):
    going_on = threading.Event()
    monkeypatch.setattr(request_runner, "quickly_planned", lambda *_: going_on.is_set())
    real = forward.prepare
    monkeypatch.setattr(forward, "prepare", lambda *args: going_on.wait(30) and real(*args))
    asking = threading.Thread(target=lambda: httpx.post(f"{url}/v1/attention/forward", json=BODY))
    asking.start()
    assert "planning" in until(url, "/health/live", 503).json()["detail"]
    going_on.set()
    asking.join(30)
    until(url, "/health/live", 200)

"""The spare process: it becomes the next model's process, counts in the budget, and gives way first."""

import os

import httpx
import psutil
import pytest
from tests.conftest import eventually, live_server

from attention_service.models.folders.model_catalogue import PROCESS_BYTES
from attention_service.models.server import spare_process

MIB = 2**20
SPARE = {"spare_model_process": True, "memory_budget": 6 * PROCESS_BYTES}


@pytest.fixture
def soon(monkeypatch, http):
    """Have a server find at once that it is idle; what starts the processes of the tests is there before."""
    http.post("/v1/models", json={"checkpoint": "one"}).raise_for_status()
    monkeypatch.setattr(spare_process, "_LOOK_S", 0.02)


def processes():
    """The processes of models, and the spare one; the parent of all is one that imports for the tests."""
    found = set()
    for each in psutil.Process().children(recursive=True):
        try:
            if each.ppid() != os.getpid() and each.status() != psutil.STATUS_ZOMBIE:
                found.add(each.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def resident(http):
    """Bytes of the budget that models and the spare process hold."""
    metric = next(line for line in http.get("/metrics").text.splitlines() if line.startswith("attention_model_bytes "))
    return float(metric.split()[1])


def ask(http, text, model="one"):
    return http.post(f"/v1/models/{model}/forward", json={"text": text}).raise_for_status()


def test_a_load_takes_the_process_that_waits_and_another_one_follows(stand_ins, repository, soon):
    before = processes()
    with live_server(repository, **SPARE) as url, httpx.Client(base_url=url, timeout=60) as http:
        assert eventually(lambda: resident(http)) == PROCESS_BYTES
        (spare,) = eventually(lambda: processes() - before)
        ask(http, "print")
        followed = eventually(lambda: len(found := processes() - before) == 2 and found)
        assert spare in followed
        model = http.get("/v1/models/one").json()["bytes"]
        assert eventually(lambda: resident(http) > model and resident(http)) == model + PROCESS_BYTES
        ask(http, "print")
    assert not processes() - before, "none outlives its server"


@pytest.mark.slow
def test_it_gives_way_before_any_model_and_comes_back_later(stand_ins, repository, soon, monkeypatch):
    monkeypatch.setattr(spare_process, "_PAUSE_S", 1.0)
    before = processes()
    with live_server(repository, **SPARE) as url, httpx.Client(base_url=url, timeout=60) as http:
        ask(http, "print")
        model = http.get("/v1/models/one").json()["bytes"]
        eventually(lambda: resident(http) == model + PROCESS_BYTES)
        need = 6 * PROCESS_BYTES - model - PROCESS_BYTES // 2
        ask(http, f"needs {need // MIB}")  # fits without the spare process alone
        assert http.get("/v1/models/one").json()["state"] == "resident"
        assert 'attention_model_events_total{event="evictions"} 0.0' in http.get("/metrics").text
        eventually(lambda: resident(http) == model + PROCESS_BYTES)
    assert not processes() - before


def test_a_spare_process_that_dies_costs_nothing_but_its_head_start(stand_ins, repository, soon):
    before = processes()
    with live_server(repository, **SPARE) as url, httpx.Client(base_url=url, timeout=60) as http:
        eventually(lambda: resident(http))
        (spare,) = eventually(lambda: processes() - before)
        os.kill(spare, 9)
        eventually(lambda: resident(http) == 0)
        ask(http, "print")
        assert http.get("/v1/models/one").json()["state"] == "resident"


@pytest.mark.sampled(settings=1)
@pytest.mark.parametrize("settings", [{"spare_model_process": False}, {"memory_budget": 3 * PROCESS_BYTES}])
def test_there_is_none_without_the_setting_or_where_memory_is_little(stand_ins, repository, soon, settings):
    before = processes()
    with live_server(repository, **SPARE | settings) as url:
        eventually(lambda: httpx.get(f"{url}/health/ready").status_code == 200)
        with pytest.raises(AssertionError, match="it did not come to hold"):
            eventually(lambda: processes() - before, seconds=0.5)

"""What is far over the budget is refused before anything is allocated for it, and others notice nothing."""

import resource
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from benchmarks.admission import BUDGET, TIMES, requests

from attention_contract.wire import SAFETENSORS
from tests.api.talk import problem
from tests.conftest import live_server

REQUESTS = requests()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The URL of a server with a small budget."""
    with live_server(tmp_path_factory.mktemp("models"), memory_budget=BUDGET) as url:
        yield url


def resident_bytes():
    """The most memory that this process, the server in it, has ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.sampled(name=4)
@pytest.mark.parametrize("name", REQUESTS)
def test_a_hundred_times_the_budget_is_refused_without_being_allocated(small, name):
    operation, body = REQUESTS[name]
    headers = {"content-type": SAFETENSORS, "accept": "application/json"}
    with httpx.Client(base_url=small, timeout=60) as http:
        before = resident_bytes()
        refusal = problem(http.post(operation.path, content=body, headers=headers))
        assert refusal["code"] in {"over_budget", "never_fits"}
        assert refusal["status"] == {"over_budget": 413, "never_fits": 507}[refusal["code"]]
        assert refusal["needed_bytes"] >= TIMES * BUDGET
        assert refusal["limit_bytes"] < refusal["needed_bytes"]
        assert str(refusal["needed_bytes"]) in refusal["detail"]
        # Of gigabytes that it would need, nothing: its body is held a few times over, in several buffers.
        assert resident_bytes() - before < 16 * len(body) < BUDGET
        assert http.get("/v1").json()["memory"]["in_flight_bytes"] == 0
        assert http.get("/v1/complexity/accuracy").json()["predictions"] == []  # nothing ever ran here


def test_others_go_on_while_requests_are_refused(small):
    stop = threading.Event()
    headers = {"content-type": SAFETENSORS, "accept": "application/json"}

    def greedy(name):
        operation, body = REQUESTS[name]
        codes = set()
        with httpx.Client(base_url=small, timeout=60) as http:
            while not stop.is_set():
                codes.add(http.post(operation.path, content=body, headers=headers).json()["code"])
        return codes

    def modest():
        with httpx.Client(base_url=small, timeout=60) as http:
            query = [[0.1 * i, 1.0] for i in range(8)]
            return [http.post("/v1/attention/weights", json={"query": query}).status_code for _ in range(30)]

    with ThreadPoolExecutor(6) as pool:
        refused = [pool.submit(greedy, name) for name in list(REQUESTS)[:4]]
        try:
            assert pool.submit(modest).result(60) == [200] * 30
        finally:
            stop.set()
        for each in refused:
            assert each.result(60) <= {"over_budget", "never_fits", "overloaded"}

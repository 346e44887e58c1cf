"""Sweeps and paths over real HTTP: a caller who leaves, or whose deadline passes, ends the work and harms nobody."""

import threading
import time

import httpx
import numpy as np
import pytest
from tests.api.talk import post
from tests.conftest import eventually, live_server

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
URL = "/v1/models/tiny/effects"
TEXT = "The cat sat. " * 120
SWEEP = {"sweep": {"tap": "masked_scores", "over": ["layers", "heads", "keys"], "set": "-Infinity"}}
PATHS = {
    "from": {"parts": ["heads", "mlps", "embeddings"], "set": "mean"},
    "to": {"parts": ["q", "k", "v", "mlps", "logits"]},
}
LONG = {"sweep": (2, SWEEP), "paths": (32, PATHS)}
"""Texts, and fields of requests that take more than 15 seconds on a machine that does nothing else."""
QUESTION = {"text": "The cat sat on the mat.", "return": ["logits"], "positions": [-1], "alone": True}


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    with live_server(tmp_path_factory.mktemp("models")) as url, httpx.Client(base_url=url, timeout=120) as made:
        post(made, "/v1/models/tiny/forward", **QUESTION)
        yield made


def in_flight(http):
    return http.get("/v1").json()["memory"]["in_flight_bytes"]


def left(http, request):
    """Leave work under way. Returns when it was left."""
    with httpx.Client(base_url=http.base_url, timeout=2) as hasty, pytest.raises(httpx.ReadTimeout):
        hasty.post(URL, json=request)
    return time.monotonic()


def overdue(http, request):
    """Let the deadline of work under way pass. Returns when it was refused."""
    refused = http.post(URL, json=request, headers={"Prefer": "wait=2"})
    assert (refused.status_code, refused.json()["code"]) == (503, "deadline_exceeded")
    return time.monotonic()


@pytest.mark.long
@pytest.mark.sampled(end=1)
@pytest.mark.parametrize("end", [left, overdue])
@pytest.mark.parametrize("work", LONG)
def test_cancelled_effects_end_free_their_memory_and_harm_no_other_caller(http, work, end):
    texts, fields = LONG[work]
    length = len(post(http, "/v1/models/tiny/forward", **QUESTION | {"text": TEXT})["labels"]["ids"])
    price = post(http, "/v1/models/tiny/complexity", length=length, batch=texts, **fields)["sweep"]
    assert price["predicted_ms"] > 15_000
    expected = post(http, "/v1/models/tiny/forward", **QUESTION)["logits"]
    replies, held, stop = [], [], threading.Event()

    def ask_beside():
        with httpx.Client(base_url=http.base_url, timeout=120) as other:
            while not stop.is_set():
                replies.append(other.post("/v1/models/tiny/forward", json=QUESTION))

    def look_beside():
        with httpx.Client(base_url=http.base_url, timeout=120) as other:
            while not stop.wait(0.05):
                held.append(in_flight(other))

    threads = [threading.Thread(target=each) for each in (ask_beside, look_beside)]
    for thread in threads:
        thread.start()
    try:
        ended = end(http, {"text": [TEXT] * texts, "alone": True, **fields})
        # A pass takes a hundredth of the whole.
        eventually(lambda: in_flight(http) < price["peak_bytes"] / 2, 10)
        assert time.monotonic() - ended < 10
        before = len(replies)
        eventually(lambda: len(replies) > before + 1)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert max(held) >= price["peak_bytes"] / 2, "the work was never admitted"
    assert {each.status_code for each in replies} == {200}
    for each in replies:
        np.testing.assert_array_equal(each.json()["logits"], expected)
    eventually(lambda: in_flight(http) == 0)

"""Sweeps over real HTTP: a caller who leaves, or whose deadline passes, ends the sweep and harms nobody."""

import threading
import time

import httpx
import numpy as np
import pytest
from tests.api.talk import post
from tests.conftest import eventually, live_server

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
URL = "/v1/models/tiny/effects"
SWEEP = {"tap": "masked_scores", "over": ["layers", "heads", "keys"], "set": "-Infinity"}
LONG = {"text": "The cat sat. " * 120, "sweep": SWEEP, "alone": True}
"""A sweep of more than 20 seconds on a machine that does nothing else."""
QUESTION = {"text": "The cat sat on the mat.", "return": ["logits"], "positions": [-1], "alone": True}


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    with live_server(tmp_path_factory.mktemp("models")) as url, httpx.Client(base_url=url, timeout=120) as made:
        post(made, "/v1/models/tiny/forward", **QUESTION)
        yield made


def in_flight(http):
    return http.get("/v1").json()["memory"]["in_flight_bytes"]


def left(http):
    """Leave a sweep under way. Returns when it was left."""
    with httpx.Client(base_url=http.base_url, timeout=2) as hasty, pytest.raises(httpx.ReadTimeout):
        hasty.post(URL, json=LONG)
    return time.monotonic()


def overdue(http):
    """Let the deadline of a sweep under way pass. Returns when it was refused."""
    refused = http.post(URL, json=LONG, headers={"Prefer": "wait=2"})
    assert (refused.status_code, refused.json()["code"]) == (503, "deadline_exceeded")
    return time.monotonic()


@pytest.mark.parametrize("end", [left, overdue])
def test_a_cancelled_sweep_ends_frees_its_memory_and_harms_no_other_caller(http, end):
    length = len(post(http, "/v1/models/tiny/forward", **QUESTION | {"text": LONG["text"]})["labels"]["ids"])
    price = post(http, "/v1/models/tiny/complexity", length=length, sweep=SWEEP)["sweep"]
    assert price["predicted_ms"] > 15_000
    expected = post(http, "/v1/models/tiny/forward", **QUESTION)["logits"]
    replies, held, stop = [], [], threading.Event()

    def ask_beside():
        with httpx.Client(base_url=http.base_url, timeout=120) as other:
            while not stop.is_set():
                held.append(in_flight(other))
                replies.append(other.post("/v1/models/tiny/forward", json=QUESTION))

    thread = threading.Thread(target=ask_beside)
    thread.start()
    try:
        ended = end(http)
        # A pass takes a hundredth of the sweep.
        eventually(lambda: in_flight(http) < price["peak_bytes"] / 2, 10)
        assert time.monotonic() - ended < 10
        before = len(replies)
        eventually(lambda: len(replies) > before + 1)
    finally:
        stop.set()
        thread.join()
    assert max(held) >= price["peak_bytes"] / 2, "the sweep was never admitted"
    assert {each.status_code for each in replies} == {200}
    for each in replies:
        np.testing.assert_array_equal(each.json()["logits"], expected)
    eventually(lambda: in_flight(http) == 0)

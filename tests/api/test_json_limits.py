"""JSON texts are bounded before they are parsed: by their bytes, their values and lists, and what parsing holds."""

import gzip
import json
import resource
import threading
import time

import httpx
import numpy as np
import pytest

from tests.api.talk import problem
from tests.conftest import live_server

FORWARD = "/v1/attention/forward"
GZIP = {"content-type": "application/json", "content-encoding": "gzip"}
PLAIN = {"content-type": "application/json"}


def filled(item, size):
    """A request whose query is a list of so many bytes of items."""
    return b'{"query": [' + b",".join([item] * (size // (len(item) + 1))) + b"]}"


@pytest.mark.parametrize("item", [b"[]", pytest.param(b"0", marks=pytest.mark.slow)])
def test_a_small_body_that_opens_to_very_many_values_costs_little(http, server, item):
    body = gzip.compress(filled(item, 2**24 - 64), 1)
    assert len(body) < 2**18
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest = 0.0
    stop = threading.Event()

    def ping():
        nonlocal slowest
        with httpx.Client(base_url=server) as own:
            while not stop.is_set():
                started = time.monotonic()
                own.get("/health/live")
                slowest = max(slowest, time.monotonic() - started)
                time.sleep(0.01)

    pinging = threading.Thread(target=ping)
    pinging.start()
    answer = http.post(FORWARD, content=body, headers=GZIP)
    stop.set()
    pinging.join()
    assert problem(answer)["status"] == 413
    assert "max_compression_ratio" in answer.json()["detail"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
    assert slowest < 2


def test_json_has_a_limit_of_its_own(tmp_path):
    x = np.zeros((1, 64, 16), np.float32)
    with live_server(tmp_path, max_json_bytes=2048) as url, httpx.Client(base_url=url, timeout=30) as http:
        assert http.get("/v1").json()["limits"]["max_json_bytes"] == 2048
        refusal = problem(http.post(FORWARD, json={"query": x.tolist()}))
        assert (refusal["code"], refusal["limit_bytes"]) == ("body_too_large", 2048)
        compressed = gzip.compress(json.dumps({"query": x.tolist()}).encode())
        assert len(compressed) < 2048
        assert problem(http.post(FORWARD, content=compressed, headers=GZIP))["code"] == "body_too_large"


def test_the_memory_of_parsing_is_counted(tmp_path):
    with live_server(tmp_path, memory_budget=2**24) as url, httpx.Client(base_url=url, timeout=30) as http:
        refusal = problem(http.post(FORWARD, content=filled(b"0.5", 2**22), headers=PLAIN))
        assert refusal["code"] == "over_budget"
        assert refusal["needed_bytes"] > 2**24
        lines = http.get("/metrics").text.splitlines()
        assert "attention_body_bytes 0.0" in lines


def test_a_large_text_of_numbers_is_read(http):
    x = np.random.default_rng(0).standard_normal((1, 3000, 64)).round(3)
    answer = http.post(FORWARD, json={"query": x.tolist(), "encoding": "base64"}, timeout=60)
    assert answer.json()["output"]["shape"] == [1, 3000, 64]
    ragged = x.tolist()
    ragged[0][17] = ragged[0][17][:-1]
    refusal = problem(http.post(FORWARD, json={"query": ragged}, timeout=60))
    assert (refusal["status"], refusal["param"]) == (422, "query")
    assert "ragged" in refusal["detail"]

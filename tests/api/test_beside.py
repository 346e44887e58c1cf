"""A large request over HTTP: tiny ones do not wait for it, and it stops when its caller goes away."""

import threading
import time

import httpx
import numpy as np
import pytest

from attention_contract.schemas.attention import RawForwardRequest
from attention_contract.wire import SAFETENSORS, to_body
from tests.conftest import eventually, live_server

HEADERS = {"content-type": SAFETENSORS, "accept": SAFETENSORS}
TINY = {"query": [[[[0.5, 1.0], [1.5, 2.0]]]]}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The address of a server."""
    with live_server(tmp_path_factory.mktemp("models"), threads=1) as address:
        yield address


@pytest.fixture
def large():
    """The body of a request that computes for many seconds."""
    query = np.full((1, 8, 20_000, 64), 0.01, np.float32)
    return b"".join(to_body(RawForwardRequest(query=query), SAFETENSORS, "request"))


def in_flight(url):
    """Bytes of the requests that wait or run."""
    return httpx.get(f"{url}/v1").json()["memory"]["in_flight_bytes"]


@pytest.mark.slow
def test_tiny_requests_are_answered_beside_a_large_one_that_stops_when_its_caller_leaves(url, large):
    with httpx.Client(base_url=url, timeout=30) as http:
        leaving = httpx.Client(base_url=url, timeout=httpx.Timeout(60, read=2.5))

        def ask():
            with leaving, pytest.raises(httpx.ReadTimeout):
                leaving.post("/v1/attention/forward", content=large, headers=HEADERS)

        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: in_flight(url))
        waits = []
        for _ in range(10):
            since = time.monotonic()
            assert http.post("/v1/attention/forward", json=TINY).status_code == 200
            waits.append(time.monotonic() - since)
        assert in_flight(url)
        assert sorted(waits)[len(waits) // 2] < 0.5  # a few milliseconds on a machine that does nothing else
        asking.join(20)
        eventually(lambda: not in_flight(url))

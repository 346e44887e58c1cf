"""Replies until they are read: counted in the memory budget, refused where it has no room, freed with their caller."""

import socket
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from attention_client import Client
from attention_contract.schemas.attention import RawForwardRequest
from attention_contract.wire import SAFETENSORS, to_body
from tests.conftest import eventually, live_server

FORWARD = "/v1/attention/forward"
BUDGET = 2**26
WIDTH = 1024
PARAMETER = "q_proj.weight"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The address of a server with a small budget, and a module whose parameters have 4 MiB."""
    settings = {"memory_budget": BUDGET, "threads": 1}
    with live_server(tmp_path_factory.mktemp("models"), **settings) as address, Client(address) as client:
        client.modules.create("m", {"d_model": WIDTH, "num_heads": 2}, seed=0)
        yield address


def metric(url, name):
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def unread(url, request):
    """A connection on which a request was sent whose answer is not read."""
    address = urlsplit(url)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
    raw.settimeout(20)
    raw.connect((address.hostname, address.port))
    raw.sendall(request)
    return raw


def test_replies_that_nobody_reads_are_counted_and_more_of_them_are_refused(url):
    value = np.ones((WIDTH // 2, WIDTH * 4), np.float32)
    body = b"".join(
        to_body(RawForwardRequest(query=value[:, :1], key=value[:, :1], value=value), SAFETENSORS, "request")
    )
    lines = (
        f"POST {FORWARD} HTTP/1.1",
        "Host: localhost",
        f"Content-Type: {SAFETENSORS}",
        f"Content-Length: {len(body)}",
    )
    head = "\r\n".join([*lines, "", ""])
    with ExitStack() as stack:
        for count in (1, 2):
            stack.enter_context(unread(url, head.encode() + body))
            assert eventually(lambda count=count: metric(url, "attention_reply_bytes") // value.nbytes == count)
        answer = httpx.post(f"{url}{FORWARD}", content=body, headers={"content-type": SAFETENSORS}, timeout=20)
        assert (answer.status_code, answer.json()["code"]) == (503, "no_room")
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["limit_bytes"] < BUDGET // 2
        small = httpx.post(f"{url}{FORWARD}", json={"query": [[1.0, 0.0]]}, timeout=20)
        assert small.status_code == 200
    assert eventually(lambda: metric(url, "attention_reply_bytes") == 0)


@pytest.mark.long
def test_a_large_reply_in_json_is_sent_piece_by_piece_and_is_whole(url):
    path = f"{url}/v1/modules/m/parameters/{PARAMETER}"
    with httpx.stream("GET", path) as answer:
        assert answer.headers["transfer-encoding"] == "chunked"
        answer.read()
    assert httpx.head(path).content == b""
    for encoding in ("json", "safetensors"):
        with Client(url, media_type=encoding) as client:
            value = client.modules.parameter("m", PARAMETER).value
        assert np.array_equal(np.array(answer.json()["value"], np.float32), np.asarray(value, np.float32))
    assert metric(url, "attention_reply_bytes") == 0


def test_a_caller_that_goes_away_stops_the_making_of_its_reply(url):
    request = f"GET /v1/modules/m/parameters/{PARAMETER} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with unread(url, request):
        assert eventually(lambda: metric(url, "attention_reply_bytes") > WIDTH * WIDTH * 4)
    assert eventually(lambda: metric(url, "attention_reply_bytes") == 0)

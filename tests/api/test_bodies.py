"""Bodies as they come in: what is stated, what has come, and the memory that is held for it."""

import asyncio
import json
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from attention_contract.errors import BodyTooLarge, OverBudget, Overloaded, Unreadable
from attention_service.api.bodies.request_body import read_body
from attention_service.runtime.scheduling.budget import Budget
from tests.api.talk import received
from tests.bodies import body_of
from tests.conftest import eventually, live_server

FORWARD = "/v1/attention/forward"
LIMIT = 2**24
STATUS = Path("/proc/self/status")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The address of a server with a small budget."""
    settings = {"memory_budget": LIMIT, "max_body_bytes": 2**35}
    with live_server(tmp_path_factory.mktemp("models"), **settings) as address:
        yield address


@pytest.fixture
def http(url):
    with httpx.Client(base_url=url, timeout=20) as client:
        yield client


def begun(url, length):
    """A connection on which a body of this length was promised, and nothing sent."""
    address = urlsplit(url)
    raw = socket.create_connection((address.hostname, address.port), timeout=20)
    head = f"POST {FORWARD} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    raw.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())
    return raw


def held(http):
    lines = http.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("attention_body_bytes "))


def test_who_promises_much_and_sends_nothing_takes_nothing_from_others(url, http):
    waiting = [begun(url, LIMIT * 3 // 4) for _ in range(4)]
    time.sleep(0.2)
    assert held(http) == 0
    body = b" " * (LIMIT // 3) + b'{"query": [[1.0, 0.0]]}'
    answer = http.post(FORWARD, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    for one in waiting:
        one.close()


def test_what_comes_is_held_in_steps_until_it_is_answered_and_is_shared_with_others(url, http):
    body = b" " * (LIMIT // 3) + json.dumps({"query": [[1.0, 0.0]]}).encode()
    with begun(url, len(body)) as raw:
        raw.sendall(body[: LIMIT // 4])
        eventually(lambda: held(http) >= LIMIT // 4)
        assert held(http) < LIMIT // 2
        with begun(url, LIMIT * 4 // 5) as second:
            answer = received(second)
            assert answer.startswith("HTTP/1.1 429")
            assert "retry-after: 1" in answer.lower()
        raw.sendall(body[LIMIT // 4 :])
        assert received(raw).startswith("HTTP/1.1 200")
    assert held(http) == 0


@pytest.mark.parametrize("length", [LIMIT + 1, 2**40])
def test_what_is_stated_beyond_the_budget_is_refused_before_it_comes(url, length):
    with begun(url, length) as raw:
        answer = received(raw)
        assert answer.startswith("HTTP/1.1 413")
        assert ("over_budget" if length < 2**35 else "body_too_large") in answer


def read(budget, stated, pieces, limit=LIMIT):
    """The body of these pieces, and what was held after each."""
    seen = []
    coming = [*pieces]

    async def receive():
        seen.append(budget.bodies)
        piece = coming.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(coming)}

    async def play():
        headers = {} if stated is None else {b"content-length": str(stated).encode()}
        with body_of(budget) as memory:
            return bytes(await read_body(headers, receive, limit, memory))

    return asyncio.run(play()), seen


def test_memory_is_taken_at_most_a_step_ahead():
    budget = Budget(2**30, 2**30, lambda: 0, 1)
    pieces = [bytes(2**16)] * 64
    whole, seen = read(budget, 2**22, pieces)
    assert whole == bytes(2**22)
    assert seen[0] == budget.bodies == 0
    for came, taken in enumerate(seen):
        assert came * 2**16 <= taken <= min(came * 2**16 + 2**21, 2**22)


@pytest.mark.skipif(not STATUS.exists(), reason="needs Linux's account of memory")
async def test_what_has_not_come_is_not_resident():
    def resident():
        lines = STATUS.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

    came = iter([bytes(2**16)] * 4)
    seen = []

    async def receive():
        seen.append(resident())
        piece = next(came, None)
        return (
            {"type": "http.disconnect"} if piece is None else {"type": "http.request", "body": piece, "more_body": True}
        )

    with body_of(Budget(2**31, 2**31, lambda: 0, 1)) as memory, pytest.raises(Unreadable):
        await read_body({b"content-length": str(2**30).encode()}, receive, 2**30, memory)
    assert max(seen) - seen[0] < 2**23


def test_a_body_longer_than_it_says_is_refused():
    budget = Budget(2**30, 2**30, lambda: 0, 1)
    with pytest.raises(Unreadable, match="more than the 100000 bytes"):
        read(budget, 100_000, [bytes(2**16)] * 2)
    assert budget.bodies == 0


def test_a_body_that_says_nothing_of_its_length_is_held_as_it_comes():
    budget = Budget(2**30, 2**30, lambda: 0, 1)
    _, seen = read(budget, None, [bytes(2**16)] * 8)
    assert seen == [2**16 * came for came in range(8)]


def test_there_is_no_more_than_there_is():
    budget = Budget(LIMIT, LIMIT, lambda: 0, 1)
    with pytest.raises(BodyTooLarge):
        read(budget, LIMIT + 1, [])
    with pytest.raises(BodyTooLarge):
        read(budget, None, [bytes(2**16)] * 8, limit=2**18)
    with pytest.raises(OverBudget):
        read(Budget(LIMIT // 2, LIMIT, lambda: 0, 1), LIMIT, [])
    with body_of(budget) as other:
        other.hold(LIMIT // 2)
        with pytest.raises(Overloaded):
            read(budget, LIMIT * 3 // 4, [])
    assert budget.bodies == 0

"""Requests of many connections at once: each gets what it gets alone, and nobody notices who fails or goes away."""

import asyncio
import socket
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from attention_contract.schemas.attention import ForwardReply, ForwardRequest
from attention_contract.wire import SAFETENSORS, from_body, to_body

PATH = "/v1/modules/{}/forward"
KINDS = ("batched", "batched-causal")


@pytest.fixture(scope="module")
def modules(http):
    for name, masks in zip(KINDS, ([], [{"name": "causal"}]), strict=True):
        config = {"d_model": 64, "num_heads": 4, "spec": {"masks": masks}}
        assert http.post("/v1/modules", json={"name": name, "config": config, "seed": 2}).status_code == 201


def drawn(rng):
    """A path and a body: mostly good, some of them impossible, some with a number that is too large."""
    x = rng.standard_normal((1, int(rng.choice([4, 16])), 64)).astype(np.float32)
    if rng.random() < 0.1:
        x = x[..., :63]
    if rng.random() < 0.1:
        x = x.astype(np.float64)
        x[0, 0, 0] = 1e300
    return PATH.format(rng.choice(KINDS)), ForwardRequest(query=x)


def body_of(ask):
    return b"".join(to_body(ask, SAFETENSORS, "request"))


async def posted(http, path, ask):
    return await http.post(path, content=body_of(ask), headers={"Content-Type": SAFETENSORS})


def same(found, expected):
    """Whether it is the same answer; how many ran together."""
    assert found.status_code == expected.status_code
    if found.status_code != 200:
        problem, other = found.json(), expected.json()
        assert {**problem, "request_id": ""} == {**other, "request_id": ""}
        return 0
    mine, other = (from_body(ForwardReply, each.content, SAFETENSORS, "reply") for each in (found, expected))
    np.testing.assert_allclose(mine.output, other.output, rtol=1e-4, atol=1e-5)
    assert other.ran.batch == 1
    assert mine.ran.flops == other.ran.flops
    return mine.ran.batch


def leave(server, path, ask):
    """Ask, and hang up without an answer."""
    url, body = urlsplit(server), body_of(ask)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {SAFETENSORS}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(head.encode() + body)


@pytest.mark.parametrize(
    ("prefer", "status"),
    [
        ("wait=0", 503),
        ("respond-async, wait=0.0", 503),
        ("wait=60", 200),
        ("handling=lenient; wait = 60", 200),
        ("wait=x", 200),
    ],
)
def test_a_caller_may_say_how_long_an_answer_is_of_use(http, modules, prefer, status):
    answer = http.post(PATH.format(KINDS[0]), json={"query": [[0.0] * 64]}, headers={"Prefer": prefer})
    assert answer.status_code == status, answer.text
    if status == 503:
        assert answer.json()["code"] == "deadline_exceeded"
        assert int(answer.headers["retry-after"]) > 0


@pytest.mark.slow
async def test_callers_on_many_connections_get_what_they_get_alone(server, modules):
    rng = np.random.default_rng(0)
    async with httpx.AsyncClient(base_url=server, timeout=60, limits=httpx.Limits(max_connections=48)) as http:
        asks = [drawn(rng) for _ in range(48)]
        expected = [await posted(http, *ask) for ask in asks]
        assert {each.status_code for each in expected} == {200, 422}
        sizes = set()
        for _ in range(60):
            found = asyncio.gather(*(posted(http, *ask) for ask in asks))
            for ask in asks[:4]:
                await asyncio.to_thread(leave, server, *ask)
            sizes |= {same(*pair) for pair in zip(await found, expected, strict=True)}
            if max(sizes) > 1:
                break
        assert max(sizes) > 1, "nothing ran together"
        for _ in range(200):
            memory = (await http.get("/v1")).json()["memory"]
            if not memory["in_flight_bytes"]:
                break
            await asyncio.sleep(0.05)
        assert memory["in_flight_bytes"] == 0
        metrics = (await http.get("/metrics")).text
    of = 'purpose="forward"'
    alone, all_of_them = (
        next(
            float(line.split()[-1])
            for line in metrics.splitlines()
            if line.startswith(f"attention_batch_requests_{name}")
        )
        for name in (f'bucket{{le="1.0",{of}}}', f"count{{{of}}}")
    )
    assert alone < all_of_them

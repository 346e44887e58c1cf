"""Compressed bodies: read as what they were, within the limits that uncompressed ones have."""

import asyncio
import gzip
import zlib

import httpx
import numpy as np
import pytest
import safetensors.numpy

from attention_contract.errors import BodyTooLarge, Cancelled
from attention_contract.wire import SAFETENSORS
from attention_service.api import disconnection
from attention_service.api.bodies.request_body import read_body, zstd
from attention_service.runtime.scheduling.budget import Budget
from tests.api.talk import problem
from tests.bodies import body_of
from tests.conftest import live_server

JSON = "application/json"
FORWARD = "/v1/attention/forward"


def zstd_without_size(data):
    stream = zstd.ZstdCompressor()
    return stream.compress(data) + stream.flush()


CODINGS = [("gzip", gzip.compress), ("deflate", zlib.compress), ("zstd", zstd.compress), ("zstd", zstd_without_size)]


def ask(http, body, coding, media_type=JSON):
    return http.post(FORWARD, content=body, headers={"content-type": media_type, "content-encoding": coding})


@pytest.mark.sampled
@pytest.mark.parametrize(("coding", "compress"), CODINGS)
@pytest.mark.parametrize("media_type", [JSON, SAFETENSORS])
def test_a_compressed_body_is_answered_as_the_body_itself(http, rng, coding, compress, media_type):
    x = rng.normal(size=(3, 200, 64)).astype(np.float32)
    body = safetensors.numpy.save({"query": x})
    if media_type == JSON:
        body = b" " * 2**21 + b'{"query": %s}' % repr(x.tolist()).encode()
    expected = http.post(FORWARD, content=body, headers={"content-type": media_type})
    answer = ask(http, compress(body), coding, media_type)
    assert answer.status_code == 200, answer.text
    np.testing.assert_array_equal(output(answer), output(expected))


def output(answer):
    if answer.headers["content-type"] == SAFETENSORS:
        return safetensors.numpy.load(answer.content)["output"]
    return np.array(answer.json()["output"])


@pytest.mark.parametrize(("coding", "compress"), CODINGS)
def test_a_body_of_several_members_is_read_whole(http, coding, compress):
    body = compress(b'{"query": [[1.0,') + compress(b" 0.0]]}")
    assert ask(http, body, coding).json()["output"] == [[1, 0]]


@pytest.mark.parametrize(("coding", "compress"), CODINGS)
def test_members_of_nothing_are_not_gone_through_without_end(http, coding, compress):
    document = problem(ask(http, compress(b"") * 2000, coding))
    assert (document["status"], document["code"]) == (400, "unreadable")


def test_codings_that_are_not_read_are_named(http):
    for coding in ("br", "gzip, gzip", "compress", "x" * 200):
        refusal = problem(ask(http, b"{}", coding))
        assert (refusal["status"], refusal["offered"]) == (415, ["gzip", "deflate", "zstd"])
        assert len(refusal["detail"]) < 200
    assert problem(ask(http, b"{}", "Identity"))["status"] == 422


@pytest.mark.parametrize(("coding", "compress"), CODINGS)
@pytest.mark.parametrize("harm", [lambda b: b"junk" + b, lambda b: b[:12] + b"\0" * 40])
def test_a_broken_compressed_body_is_unreadable(http, coding, compress, harm):
    body = compress(b'{"query": [[' + b"0.25, " * 500 + b"0]]}")
    refusal = problem(ask(http, harm(body), coding))
    assert refusal["status"] == 400
    assert f"Content-Encoding: {coding}" in refusal["detail"]


@pytest.mark.parametrize(("coding", "compress"), CODINGS)
def test_a_compressed_body_that_ends_too_early_is_refused_as_such(http, coding, compress):
    body = compress(b'{"query": [[1.0, 0.0]]}')
    for missing in range(1, len(body)):
        assert f"Content-Encoding: {coding}" in problem(ask(http, body[:-missing], coding))["detail"]


def test_the_limit_holds_for_what_comes_out(tmp_path):
    with live_server(tmp_path, max_body_bytes=2**20) as url, httpx.Client(base_url=url) as http:
        for coding, compress in CODINGS:
            bomb = compress(b" " * 2**24)
            assert len(bomb) < 2**20
            refusal = problem(ask(http, bomb, coding))
            assert (refusal["status"], refusal["code"], refusal["limit_bytes"]) == (413, "body_too_large", 2**20)
            assert refusal["needed_bytes"] < 2**22  # it stopped there
            assert ask(http, compress(b'{"query": [[1.0, 0.0]]}' + b" " * 2**19), coding).status_code == 200


@pytest.mark.slow
def test_what_comes_out_is_held_in_the_budget(tmp_path):
    with live_server(tmp_path, memory_budget=8 * 2**20) as url, httpx.Client(base_url=url) as http:
        for coding, compress in CODINGS:
            refusal = problem(ask(http, compress(b" " * 2**26), coding))
            assert (refusal["status"], refusal["code"]) == (413, "over_budget")
            assert "attention_body_bytes 0.0" in http.get("/metrics").text


@pytest.mark.parametrize(("coding", "compress"), CODINGS)
@pytest.mark.slow
async def test_nothing_more_is_decompressed_once_the_caller_has_left(monkeypatch, coding, compress):
    monkeypatch.setattr(disconnection, "_WATCHED_AFTER_S", 0.001)
    bomb = compress(b" " * 2**27)
    budget = Budget(2**40, 2**40, lambda: 0, 1)
    messages = [{"type": "http.request", "body": bomb}, {"type": "http.disconnect"}]

    async def receive():
        return messages.pop(0)

    with body_of(budget) as memory:
        with pytest.raises(Cancelled):
            await read_body({b"content-encoding": coding.encode()}, receive, 2**40, memory)
        assert budget.bodies < 2**26


def read_within_ratio(text, coding, budget, held):
    """The content of a body whose ratio of compression may be 100. The bytes that were held for it go to ``held``."""
    messages = [{"type": "http.request", "body": text, "more_body": False}]

    async def receive():
        return messages.pop() if messages else await asyncio.get_running_loop().create_future()

    async def play():
        with body_of(budget) as memory:
            try:
                return bytes(await read_body({b"content-encoding": coding.encode()}, receive, 2**40, memory, 100))
            finally:
                held.append(budget.bodies)

    return asyncio.run(play())


@pytest.mark.parametrize(("coding", "compress"), CODINGS)
def test_a_bomb_is_refused_once_it_has_exploded_a_little(coding, compress):
    budget, held = Budget(2**40, 2**40, lambda: 0, 1), []
    with pytest.raises(BodyTooLarge, match="max_compression_ratio allows a factor of 100") as refusal:
        read_within_ratio(compress(bytes(2**24)) * 200, coding, budget, held)
    assert refusal.value.facts["actual"] > 100
    assert held[0] < 2**24


def test_a_ratio_that_is_allowed_is_read(rng):
    body = rng.integers(0, 255, 2**20, np.uint8).tobytes() + bytes(2**24)
    assert read_within_ratio(gzip.compress(body, 1), "gzip", Budget(2**30, 2**30, lambda: 0, 1), []) == body

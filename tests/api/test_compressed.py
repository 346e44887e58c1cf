"""Compressed bodies: read as what they were, within the limits that uncompressed ones have."""

import gzip

import httpx
import numpy as np
import pytest
import safetensors.numpy
import zstandard

from attention_contract.wire import SAFETENSORS
from tests.api.talk import problem
from tests.conftest import live_server

JSON = "application/json"
FORWARD = "/v1/attention/forward"


def zstd(data):
    return zstandard.ZstdCompressor().compress(data)


def zstd_without_size(data):
    stream = zstandard.ZstdCompressor().compressobj()
    return stream.compress(data) + stream.flush()


CODINGS = [("gzip", gzip.compress), ("zstd", zstd), ("zstd", zstd_without_size)]


def ask(http, body, coding, media_type=JSON):
    return http.post(FORWARD, content=body, headers={"content-type": media_type, "content-encoding": coding})


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


def test_a_gzip_body_of_several_members_is_read_whole(http):
    body = gzip.compress(b'{"query": [[1.0,') + gzip.compress(b" 0.0]]}")
    assert ask(http, body, "gzip").json()["output"] == [[1, 0]]


def test_members_of_nothing_are_not_gone_through_without_end(http):
    document = problem(ask(http, gzip.compress(b"") * 2000, "gzip"))
    assert (document["status"], document["code"]) == (400, "unreadable")


def test_a_large_body_that_hardly_compresses_is_read_in_good_time(http, rng):
    x = rng.normal(size=(1, 2048, 512)).astype(np.float32)
    body = safetensors.numpy.save({"query": x, "key": x[:, :1], "value": x[:, :1]})
    reply = http.post(
        FORWARD, content=gzip.compress(body, 1), headers={"content-type": SAFETENSORS, "content-encoding": "gzip"}
    )
    assert reply.status_code == 200, reply.text
    assert np.array_equal(safetensors.numpy.load(reply.content)["output"], np.repeat(x[:, :1], 2048, axis=1))


def test_codings_that_are_not_read_are_named(http):
    for coding in ("br", "gzip, gzip", "deflate", "x" * 200):
        refusal = problem(ask(http, b"{}", coding))
        assert (refusal["status"], refusal["offered"]) == (415, ["gzip", "zstd"])
        assert len(refusal["detail"]) < 200
    assert problem(ask(http, b"{}", "Identity"))["status"] == 422


@pytest.mark.parametrize(("coding", "compress"), CODINGS)
@pytest.mark.parametrize("harm", [lambda b: b[: len(b) // 2], lambda b: b"junk" + b, lambda b: b[:12] + b"\0" * 40])
def test_a_broken_compressed_body_is_unreadable(http, coding, compress, harm):
    body = compress(b'{"query": [[' + b"0.25, " * 500 + b"0]]}")
    assert problem(ask(http, harm(body), coding))["status"] == 400


@pytest.mark.parametrize(("coding", "compress"), CODINGS)
def test_the_limit_holds_for_what_comes_out(tmp_path, coding, compress):
    with live_server(tmp_path, max_body_bytes=2**20) as url, httpx.Client(base_url=url) as http:
        bomb = compress(b" " * 2**28)
        assert len(bomb) < 2**20
        refusal = problem(ask(http, bomb, coding))
        assert (refusal["status"], refusal["code"], refusal["limit_bytes"]) == (413, "body_too_large", 2**20)
        assert refusal["needed_bytes"] < 2**22  # it stopped there
        assert ask(http, compress(b'{"query": [[1.0, 0.0]]}' + b" " * 2**19), coding).status_code == 200


@pytest.mark.parametrize(("coding", "compress"), CODINGS)
def test_what_comes_out_is_held_in_the_budget(tmp_path, coding, compress):
    with live_server(tmp_path, memory_budget=8 * 2**20) as url, httpx.Client(base_url=url) as http:
        refusal = problem(ask(http, compress(b" " * 2**26), coding))
        assert (refusal["status"], refusal["code"]) == (413, "over_budget")
        assert "attention_body_bytes 0.0" in http.get("/metrics").text

"""Express on the wire: however a request comes, it is answered as by the ordinary way."""

import itertools
import re

import numpy as np
import pytest

from attention_contract.errors import Overloaded
from attention_service.runtime.scheduling.budget import Body
from tests.api.express.talk import ORDINARY, Wire, ask, body_of, message, output_of, same, soon


def test_a_request_may_come_in_any_pieces(url, taken, three):
    (body, *_), (expected, *_) = three
    whole = message(body)
    at = len(whole) - len(body)
    taken.clear()
    with Wire(url) as wire:
        for cuts in ((1,), (10, at), (at - 1, at + 1), (at + 8,), (len(whole) - 1,), tuple(range(at, len(whole), 40))):
            edges = [0, *cuts, len(whole)]
            wire.send(*(whole[start:end] for start, end in itertools.pairwise(edges)), pause=0.004)
            same(wire.answer(), expected)
    assert taken == [True] * 6


def test_requests_may_come_one_behind_the_other(url, taken, three):
    bodies, answers = three
    taken.clear()
    with Wire(url) as wire:
        health = b"GET /health/live HTTP/1.1\r\nhost: here\r\n\r\n"
        wire.send(message(bodies[0]) + message(bodies[1]) + health + message(bodies[2]) + message(bodies[0])[:-5])
        same(wire.answer(), answers[0])
        same(wire.answer(), answers[1])
        assert wire.answer().status_code == 200
        same(wire.answer(), answers[2])
        wire.send(message(bodies[0])[-5:])
        same(wire.answer(), answers[0])
    assert taken[0]


@pytest.mark.parametrize(
    ("more", "version", "closes"),
    [(["connection: close"], "1.1", True), ([], "1.0", True), (["connection: keep-alive"], "1.0", True),
     (["expect: 100-continue"], "1.1", False)],
    ids=str,
)  # fmt: skip
def test_connections_that_are_not_as_usual_go_the_ordinary_way(url, taken, three, more, version, closes):
    (body, *_), (expected, *_) = three
    with Wire(url) as wire:
        if version == "1.0" and more:  # the same text as before, but for the version
            wire.send(message(body, *more))
            wire.answer()
        taken.clear()
        wire.send(message(body, *more, version=version))
        if "expect: 100-continue" in more:
            assert wire._file.readline().split()[1] == b"100"
            assert wire._file.readline() == b"\r\n"
        answer = wire.answer()
        assert answer.status_code == 200
        np.testing.assert_array_equal(output_of(answer), output_of(expected))
        assert not any(taken)
        assert (answer.headers.get("connection") == "close") is closes
        if closes:
            assert wire.answer() is None


def test_a_body_in_chunks_goes_the_ordinary_way(url, taken, three):
    (body, *_), (expected, *_) = three
    taken.clear()
    chunked = message(b"", "transfer-encoding: chunked", length=False)
    with Wire(url) as wire:
        wire.send(chunked + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        same(wire.answer(), expected)
        wire.send(message(body))
        same(wire.answer(), expected)
    assert taken == [False, True]


def test_half_a_request_is_given_up_with_its_connection(url, http, three, capsys):
    (body, *_), (expected, *_) = three
    large = body_of(np.zeros((8, 700, 8), np.float32))
    held = re.compile(r"^attention_body_bytes (\S+)$", re.MULTILINE)
    for whole in (message(body), message(large)):
        capsys.readouterr()
        with Wire(url) as wire:
            wire.send(whole[:-10], pause=0.1)
        read = []
        assert soon(lambda read=read: read.append(capsys.readouterr().err) or "status=400" in "".join(read))
        assert float(held.search(http.get("/metrics").text)[1]) == 0
    same(ask(http, "plain", body), expected)


def test_a_large_body_is_counted_as_long_as_it_is_here(url, http):
    whole = message(body_of(np.zeros((8, 700, 8), np.float32)))
    held = re.compile(r"^attention_body_bytes (\S+)$", re.MULTILINE)

    def bytes_held():
        return float(held.search(http.get("/metrics").text)[1])

    with Wire(url) as wire:
        for _ in range(3):
            wire.send(whole[:-10])
            assert soon(lambda: bytes_held() > 150_000)
            wire.send(whole[-10:])
            assert wire.answer().status_code == 200
            assert soon(lambda: bytes_held() == 0)


def test_nothing_is_lost_of_a_body_for_which_there_was_no_memory_for_a_moment(url, http, taken, rng, monkeypatch):
    large = body_of(rng.standard_normal((2, 700, 8)).astype(np.float32))
    expected = ask(http, "plain", large, **ORDINARY)
    real, failed = Body.hold, []

    def once(self, more):
        if not failed:
            failed.append(more)
            raise Overloaded("others have it")
        real(self, more)

    taken.clear()
    monkeypatch.setattr(Body, "hold", once)
    with Wire(url) as wire:
        at = len(message(large)) - len(large) + 4096
        wire.send(message(large)[:at], message(large)[at:])
        same(wire.answer(), expected)
    assert failed
    assert taken == [False]

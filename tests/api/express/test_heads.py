"""Requests that are the one before but for their bodies are not parsed; all others are, and get what they should."""

import itertools
import time

import numpy as np
import pytest

from tests.api.express.talk import Wire, ask, body_of, in_order, introduce, message, output_of, same
from tests.api.talk import post

HEALTH = b"GET /health/live HTTP/1.1\r\nhost: here\r\n\r\n"


def asked(wire, whole, expected):
    wire.send(whole, pause=0)
    same(wire.answer(), expected)


def test_a_head_that_came_before_is_not_parsed(url, taken, parsed, three):
    bodies, answers = three
    taken.clear()
    with Wire(url) as wire:
        for body, expected in zip(bodies, answers, strict=True):
            asked(wire, message(body), expected)
    assert parsed.count(message(bodies[0])) == 1
    assert not {message(body) for body in bodies[1:]} & {*parsed}
    assert taken == [True] * 3


def test_each_connection_has_heads_of_its_own(url, parsed, three):
    (body, *_), (expected, *_) = three
    with Wire(url) as one, Wire(url) as other:
        for wire in (one, other, one, other):
            asked(wire, message(body), expected)
    assert parsed.count(message(body)) == 2


def _another_path(body):
    return message(body, name="causal")


def _another_version(body):
    return message(body, version="1.0")


def _closing(body):
    return message(body, "connection: close")


def _an_id(body):
    return message(body, "x-request-id: mine")


@pytest.mark.parametrize("other", [_another_path, _another_version, _closing, _an_id])
def test_another_head_is_parsed(url, http, parsed, three, other):
    (body, *_), (expected, *_) = three
    introduce(http, "causal", body)
    with Wire(url) as wire:
        asked(wire, message(body), expected)
        wire.send(other(body), pause=0)
        assert wire.answer().status_code == 200
    assert other(body) in parsed


def test_an_id_is_repeated_each_time(url, parsed, three):
    (body, *_), (expected, *_) = three
    whole = message(body, "x-request-id: mine")
    with Wire(url) as wire:
        for _ in range(3):
            wire.send(whole, pause=0)
            answer = wire.answer()
            assert answer.headers["x-request-id"] == "mine"
            same(answer, expected)
    assert parsed.count(whole) == 3


def test_ids_that_are_made_differ(url, three):
    (body, *_), _ = three
    made = set()
    with Wire(url) as wire:
        for _ in range(4):
            wire.send(message(body), pause=0)
            made.add(wire.answer().headers["x-request-id"])
    assert len(made) == 4


def test_a_body_that_says_something_else_is_parsed(url, parsed, three):
    (body, *_), (expected, *_) = three
    broken = bytearray(body)
    broken[10:12] = b"{{"
    with Wire(url) as wire:
        asked(wire, message(body), expected)
        wire.send(message(bytes(broken)), pause=0)
        assert wire.answer().status_code == 400
        asked(wire, message(body), expected)
    assert message(bytes(broken)) in parsed


def test_a_module_that_is_gone_is_not_answered_for(url, http, parsed, rng):
    body = body_of(rng.standard_normal((1, 4, 8)).astype(np.float32))
    post(http, "/v1/modules", name="brief", config={"d_model": 8, "num_heads": 2})
    introduce(http, "brief", body)
    whole = message(body, name="brief")
    with Wire(url) as wire:
        for _ in range(2):
            wire.send(whole, pause=0)
            assert wire.answer().status_code == 200
        http.delete("/v1/modules/brief")
        wire.send(whole, pause=0)
        assert wire.answer().status_code == 404


def test_one_behind_another_that_waits_keeps_its_order(url, waits, parsed, three, gate):
    bodies, answers = three
    gate.set()
    with Wire(url) as wire:
        asked(wire, message(bodies[0]), answers[0])
        in_order(wire, waits, gate, bodies[1:3], answers[1:3])
    assert message(bodies[1]) not in parsed  # it was answered without
    assert message(bodies[2]) in parsed  # it had to wait


@pytest.mark.parametrize("count", [2, 3])
def test_requests_that_come_together_again_are_each_answered(url, three, count):
    bodies, answers = three
    together = b"".join(message(body) for body in bodies[:count])
    same_bodies = message(bodies[0]) * count
    with Wire(url) as wire:
        for _ in range(3):
            for whole, expected in ((together, answers), (same_bodies, answers[:1] * count)):
                wire.send(whole)
                for index in range(count):
                    same(wire.answer(), expected[index])


@pytest.mark.parametrize("seed", range(12))
def test_any_requests_in_any_pieces_are_answered_in_their_order(url, http, three, seed):
    rng = np.random.default_rng(seed)
    bodies, answers = three
    introduce(http, "causal", bodies[0])
    kinds = [(message(body), answer) for body, answer in zip(bodies, answers, strict=True)]
    kinds += [(message(bodies[0], name="causal"), ask(http, "causal", bodies[0]))]
    kinds += [(message(bodies[1], "x-request-id: mine"), answers[1]), (b"\r\n" + message(bodies[2]), answers[2])]
    kinds += [(message(b"no tensors"), None), (HEALTH, None)]
    weights = np.array([6, 6, 6, 2, 2, 2, 1, 2])
    drawn = [kinds[at] for at in rng.choice(len(kinds), 40, p=weights / weights.sum())]
    edges = [0, *itertools.accumulate(len(text) for text, _ in drawn)]
    whole = b"".join(text for text, _ in drawn)
    cuts = {*edges, *rng.integers(0, len(whole), 10).tolist()} - {*rng.choice(edges[1:-1], 15).tolist()}
    with Wire(url) as wire:
        for start, end in itertools.pairwise(sorted(cuts)):
            wire.socket.sendall(whole[start:end])
            time.sleep(0.002)
        for text, expected in drawn:
            answer = wire.answer()
            if expected is not None:
                assert answer.status_code == 200, text[:200]
                np.testing.assert_allclose(output_of(answer), output_of(expected), rtol=1e-5, atol=1e-5)
            else:
                assert answer.status_code == (200 if text == HEALTH else 400), answer.text

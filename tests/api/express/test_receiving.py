"""Large requests that are the one before but for their bodies are received where they are read, and get what they
should."""

import itertools
import json
import threading
import time

import httpx
import numpy as np
import pytest
import uvicorn

from attention_contract.wire import JSON
from attention_service.api.connection import Connection
from attention_service.api.receiving import Head
from tests.api.express.talk import Wire, ask, body_of, in_order, introduce, message, output_of, same, soon
from tests.api.talk import post
from tests.conftest import live_server

HEALTH = b"GET /health/live HTTP/1.1\r\nhost: here\r\n\r\n"
SHAPE = (3, 700, 8)


@pytest.fixture
def large(http, rng):
    """Four requests that express knows, too large to go uncounted, and their answers."""
    bodies = [body_of(rng.standard_normal(SHAPE).astype(np.float32)) for _ in range(4)]
    introduce(http, "plain", bodies[0])
    return bodies, [ask(http, "plain", body) for body in bodies]


@pytest.fixture
def received(monkeypatch):
    """The bodies that were received where they are read."""
    seen, real = [], Connection.answers_again

    def again(self, known, body, memory=None):
        before = len(seen)
        if memory is not None:  # noted before it is answered
            seen.append(bytes(body))
        answered = real(self, known, body, memory)
        if not answered:
            del seen[before:]
        return answered

    monkeypatch.setattr(Connection, "answers_again", again)
    return seen


def bodies_in(express):
    return express._engine().budget.bodies


def begin(wire, large):
    """Two alike, after which others are expected."""
    bodies, answers = large
    for body, expected in zip(bodies[:2], answers[:2], strict=True):
        wire.send(message(body), pause=0)
        same(wire.answer(), expected)


@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_others_like_two_that_came_are_not_parsed(served, url, large, received, parsed, pieces):
    bodies, answers = large
    with Wire(url) as wire:
        begin(wire, large)
        parsed.clear()
        for body, expected in zip(bodies * 2, answers * 2, strict=True):
            whole = message(body)
            step = -(-len(whole) // pieces)
            wire.send(*(whole[at : at + step] for at in range(0, len(whole), step)), pause=0.005 if pieces > 1 else 0)
            same(wire.answer(), expected)
    assert received == bodies * 2
    assert parsed == []
    assert soon(lambda: bodies_in(served[1]) == 0)


def test_a_head_may_come_before_its_body(url, large, received):
    bodies, answers = large
    with Wire(url) as wire:
        for body, expected in zip(bodies, answers, strict=True):
            head = message(body)[: -len(body)]
            wire.send(head, body)
            same(wire.answer(), expected)
    assert received == bodies[2:]


def test_lists_in_json_may_differ_in_length(http, url, received, rng):
    queries = [np.round(rng.standard_normal((1, 60, 8)) * 10.0**power, 9) for power in (0, 3, -3, 1, 2)]
    queries = [np.tile(query, (1, 12, 1)) for query in queries]
    bodies = [json.dumps({"query": query.tolist()}).encode() for query in queries]
    assert len({len(body) for body in bodies}) == 5
    for _ in range(2):
        expected = [
            http.post("/v1/modules/plain/forward", content=body, headers={"content-type": JSON}) for body in bodies
        ]
    with Wire(url) as wire:
        for _ in range(3):
            for body, answer in zip(bodies, expected, strict=True):
                wire.send(message(body).replace(b"application/vnd.safetensors", b"application/json"), pause=0)
                found = wire.answer()
                assert found.status_code == 200, found.text
                np.testing.assert_allclose(found.json()["output"], answer.json()["output"], rtol=1e-6)
    assert len(received) > 5


def _small(body):
    return message(body_of(np.ones((1, 4, 8), np.float32)))


def _an_id(body):
    return message(body, "x-request-id: mine")


def _another_path(body):
    return message(body, name="causal")


def _longer(body):
    return message(body_of(np.ones((3, 900, 8), np.float32)))


def _shorter(body):
    return message(body_of(np.ones((3, 600, 8), np.float32)))


def _another_header(body):
    return message(bytes(body[:20]) + b"}" + body[21:])


def _health(body):
    return HEALTH


def _two(body):
    return message(body) + HEALTH


def _zeros(body):
    return message(body).replace(b"content-length: ", b"content-length: 00")


@pytest.mark.parametrize("pause", [0, 0.01])
@pytest.mark.parametrize(
    ("other", "statuses"),
    [
        (_small, [200]), (_an_id, [200]), (_another_path, [200]), (_longer, [200]), (_shorter, [200]), (_health, [200]),
        (_another_header, [400]), (_two, [200, 200]), (_zeros, [200]),
    ],
)  # fmt: skip
def test_what_is_not_like_them_gets_what_it_should(url, large, received, other, statuses, pause):
    bodies, answers = large
    with Wire(url) as wire:
        for _ in range(2):
            begin(wire, large)
            wire.send(message(bodies[2]), pause=0)
            same(wire.answer(), answers[2])
            whole = other(bodies[3])
            cut = len(whole) // 3 if pause else 0
            wire.send(whole[:cut], whole[cut:], pause=pause)
            assert [wire.answer().status_code for _ in statuses] == statuses
    assert bodies[2] in received


@pytest.mark.parametrize("seed", range(10))
def test_any_requests_in_any_pieces_are_answered_in_their_order(url, http, three, large, seed):
    rng = np.random.default_rng(seed)
    bodies, answers = large
    introduce(http, "causal", bodies[0])
    kinds = [(message(body), answer) for body, answer in zip(bodies, answers, strict=True)]
    kinds += [(message(body), answer) for body, answer in zip(*three, strict=True)]
    kinds += [(message(bodies[0], name="causal"), ask(http, "causal", bodies[0]))]
    kinds += [(message(b"no tensors"), None), (HEALTH, None)]
    weights = np.array([9, 9, 9, 9, 2, 2, 2, 2, 1, 2])
    drawn = [kinds[at] for at in rng.choice(len(kinds), 40, p=weights / weights.sum())]
    edges = [0, *itertools.accumulate(len(text) for text, _ in drawn)]
    whole = b"".join(text for text, _ in drawn)
    cuts = {*edges, *rng.integers(0, len(whole), 20).tolist()} - {*rng.choice(edges[1:-1], 8).tolist()}
    found = []

    def receive(wire):
        found.extend(wire.answer() for _ in drawn)

    with Wire(url) as wire:
        receiving = threading.Thread(target=receive, args=(wire,))
        receiving.start()
        for start, end in itertools.pairwise(sorted(cuts)):
            wire.socket.sendall(whole[start:end])
            time.sleep(0.002)
        receiving.join(60)
    for (text, expected), answer in zip(drawn, found, strict=True):
        if expected is not None:
            assert answer.status_code == 200, text[:200]
            np.testing.assert_allclose(output_of(answer), output_of(expected), rtol=1e-5, atol=1e-5)
        else:
            assert answer.status_code == (200 if text == HEALTH else 400), answer.text


def test_a_caller_who_leaves_in_the_middle_leaves_nothing(served, url, large, received):
    bodies, answers = large
    with Wire(url) as wire:
        begin(wire, large)
        wire.send(message(bodies[2]), pause=0)
        same(wire.answer(), answers[2])
        wire.send(message(bodies[3])[:30_000], pause=0)
        assert soon(lambda: bodies_in(served[1]) > 0)
    assert soon(lambda: bodies_in(served[1]) == 0)
    assert received == [bodies[2]]


def test_where_there_is_no_memory_the_ordinary_way_tells(served, url, large, received, monkeypatch):
    bodies, answers = large
    budget = served[1]._engine().budget
    with Wire(url) as wire:
        begin(wire, large)
        with monkeypatch.context() as full:
            full.setattr(budget, "bodies", budget.total)
            wire.send(message(bodies[2]), pause=0)
            assert wire.answer().status_code in {413, 429, 503}
        for body, expected in zip(bodies, answers, strict=True):
            wire.send(message(body), pause=0)
            same(wire.answer(), expected)
    assert received
    assert soon(lambda: budget.bodies == 0)


def test_one_behind_another_that_waits_keeps_its_order(url, large, waits, gate):
    bodies, answers = large
    gate.set()
    with Wire(url) as wire:
        begin(wire, large)
        in_order(wire, waits, gate, bodies[2:], answers[2:])


def test_a_module_that_is_gone_is_not_answered_for(url, http, received, rng):
    body = body_of(rng.standard_normal(SHAPE).astype(np.float32))
    post(http, "/v1/modules", name="brief", config={"d_model": 8, "num_heads": 2})
    introduce(http, "brief", body)
    with Wire(url) as wire:
        for _ in range(3):
            wire.send(message(body, name="brief"), pause=0)
            assert wire.answer().status_code == 200
        assert received == [body]
        http.delete("/v1/modules/brief")
        wire.send(message(body, name="brief"), pause=0)
        assert wire.answer().status_code == 404


@pytest.mark.parametrize("part", [0, 30_000])
def test_a_server_stops_while_others_are_expected(tmp_path, rng, part):
    bodies = [body_of(rng.standard_normal(SHAPE).astype(np.float32)) for _ in range(3)]
    with live_server(tmp_path) as url:
        with httpx.Client(base_url=url) as http:
            post(http, "/v1/modules", name="plain", config={"d_model": 8, "num_heads": 2})
        wire = Wire(url)
        for _ in range(2):
            for body in bodies:
                wire.send(message(body), pause=0)
                assert wire.answer().status_code == 200
        wire.send(message(bodies[0])[:part])
        stopping = time.monotonic()
    assert time.monotonic() - stopping < 15
    with wire:
        answer = wire.answer()
        assert answer is None or answer.status_code >= 400


KNOWN = object()
TEXT = b"POST /v1/modules/m/forward HTTP/1.1\r\nHost: here\r\nContent-Length: 65536\r\nAccept: */*\r\n\r\n"


def test_a_head_is_known_again_by_all_but_its_length():
    head = Head.of(TEXT, KNOWN)
    for length in (b"1", b"65536", b"999999999"):
        whole = TEXT.replace(b"65536", length) + b"body"
        assert head.body_in(whole) == (len(whole) - 4, int(length))
        assert all(head.may_begin(whole[:end]) for end in range(len(whole) - 4))
    for other in (
        TEXT.replace(b"65536", b""), TEXT.replace(b"65536", b"1234567890"), TEXT.replace(b"65536", b"+5"),
        TEXT.replace(b"65536", b" 5"), TEXT.replace(b"/m/", b"/n/"), TEXT.replace(b"*/*", b"a/b"),
        TEXT[:-4] + b"\r\nx: y\r\n\r\n", TEXT.replace(b"65536", "٣".encode()), HEALTH,
    ):  # fmt: skip
        assert head.body_in(other) is None
        assert not head.may_begin(other)


@pytest.mark.parametrize("text", [b"", b"POST / HTTP/1.1\r\n\r\n", TEXT[:-1], TEXT + b"x", TEXT + TEXT, TEXT[:-4]])
def test_what_is_no_head_is_not_taken_for_one(text):
    assert Head.of(text, KNOWN) is None


def test_the_event_loop_of_python_does_as_well(tmp_path, monkeypatch, rng, received):
    """Its transports choose by another rule how a protocol receives."""
    real = uvicorn.Config
    monkeypatch.setattr(uvicorn, "Config", lambda *given, **settings: real(*given, **settings | {"loop": "asyncio"}))
    bodies = [body_of(rng.standard_normal(SHAPE).astype(np.float32)) for _ in range(3)]
    with live_server(tmp_path) as url:
        with httpx.Client(base_url=url) as http:
            post(http, "/v1/modules", name="plain", config={"d_model": 8, "num_heads": 2}, seed=1)
            expected = [[ask(http, "plain", body) for body in bodies] for _ in range(2)][1]
        with Wire(url) as wire:
            for body, answer in zip(bodies * 2, expected * 2, strict=True):
                wire.send(message(body), pause=0)
                same(wire.answer(), answer)
            wire.send(HEALTH, pause=0)
            assert wire.answer().status_code == 200
    assert received[-4:] == bodies[2:] + bodies

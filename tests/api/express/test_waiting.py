"""Express where requests wait: in company, behind others, in vain, at the end, and on idle connections."""

import re
import threading
import time

import httpx
import numpy as np

from attention_service.api import problems
from attention_service.api.connection import Connection
from attention_service.runtime.operations.forward import Forward
from tests.api.express.talk import ORDINARY, Wire, ask, body_of, introduce, message, output_of, same, soon, told
from tests.api.talk import post, problem
from tests.conftest import live_server


def in_wait(waits):
    """Those of what express began that are not over."""
    return [each for each in waits if each is not None and not each.over]


def test_those_that_wait_run_together_and_each_gets_its_own(url, http, waits, rng, gate):
    bodies = [body_of(rng.standard_normal((1, length, 8)).astype(np.float32)) for length in (4, 4, 4, 3, 4)]
    gate.set()
    for body in bodies:
        introduce(http, "plain", body)
    expected = [ask(http, "plain", body) for body in bodies]
    gate.clear()
    gate.begun.clear()
    wires = [Wire(url) for _ in bodies]
    try:
        for wire, body in zip(wires, bodies, strict=True):
            wire.send(message(body))
        assert soon(lambda: len(in_wait(waits)) == 5 and gate.begun)
        gate.set()
        answers = [wire.answer() for wire in wires]
    finally:
        for wire in wires:
            wire.close()
    batches = []
    for answer, other in zip(answers, expected, strict=True):
        mine, theirs = told(answer), told(other)
        batches.append(mine[2]["ran"].pop("batch"))
        assert theirs[2]["ran"].pop("batch") == 1
        assert mine == theirs
        np.testing.assert_allclose(output_of(answer), output_of(other), rtol=1e-5, atol=1e-6)
    assert batches[0] == 1
    assert batches[1] == batches[2] == batches[4] >= 3  # whether one of another length joins them, the clock decides


def test_a_caller_who_went_away_is_not_waited_for(url, http, waits, three, gate, capsys):
    bodies, answers = three
    with Wire(url) as first, Wire(url) as third:
        first.send(message(bodies[0]))
        assert soon(lambda: len(gate.begun) == 1)
        gone = Wire(url)
        gone.send(message(bodies[1], "x-request-id: gone"))
        third.send(message(bodies[2]))
        assert soon(lambda: len(in_wait(waits)) == 3)
        gone.close()
        told_of = re.compile(r'^attention_requests_total\{operation="forward",status="499"\} 1.0$', re.MULTILINE)
        assert soon(lambda: told_of.search(http.get("/metrics").text))
        gate.set()
        same(first.answer(), answers[0])
        same(third.answer(), answers[2])
    assert gate.begun == [1, 1]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "request_id=gone" in line]
    assert "status=499" in line
    assert re.search(r"^attention_in_flight_bytes 0.0$", http.get("/metrics").text, re.MULTILINE)


def test_who_goes_away_with_requests_behind_one_another_is_given_up(url, http, three, gate, caplog):
    bodies, answers = three
    ordinary = [f"{name}: {value}" for name, value in ORDINARY.items()]

    def given_up():
        text = http.get("/metrics").text
        found = re.search(r'^attention_requests_total\{operation="forward",status="499"\} (.*)$', text, re.MULTILINE)
        return 0.0 if found is None else float(found[1])

    before = given_up()
    gone = Wire(url)
    gone.send(b"".join(message(body, *ordinary) for body in bodies))
    assert soon(lambda: len(gate.begun) == 1)
    gone.close()
    assert soon(lambda: given_up() == before + 1)
    gate.set()
    with Wire(url) as wire:
        wire.send(message(bodies[0], *ordinary))
        same(wire.answer(), answers[0])
    assert gate.begun == [1, 1]
    assert not [record for record in caplog.records if record.name == "uvicorn.error" and record.exc_info]


def test_requests_behind_one_that_waits_keep_their_order(url, taken, three, gate):
    bodies, answers = three
    with Wire(url) as wire:
        wire.send(message(bodies[0]) + message(bodies[1]), message(bodies[2]))
        assert soon(lambda: len(gate.begun) == 1)
        gate.set()
        for expected in answers:
            same(wire.answer(), expected)


def test_a_fault_is_told_as_ever(http, taken, three, monkeypatch):
    (body, *_), (expected, *_) = three

    def fails(*_):
        raise ZeroDivisionError

    taken.clear()
    logged = []
    with monkeypatch.context() as patched:
        patched.setattr(problems.log, "error", lambda event, **more: logged.append((event, more)), raising=False)
        patched.setattr(Forward, "launch", fails)
        answers = [ask(http, "plain", body), ask(http, "plain", body, **ORDINARY)]
    documents = [problem(answer) for answer in answers]
    assert taken == [True, False]
    for document, (event, more) in zip(documents, logged, strict=True):
        assert (event, more["path"]) == ("internal_error", "/v1/modules/plain/forward")
        assert more["request_id"] == document["request_id"]
        assert isinstance(more["exc_info"], ZeroDivisionError)
    assert documents[0].pop("request_id") != documents[1].pop("request_id")
    assert documents[0] == documents[1]
    assert documents[0]["status"] == 500
    assert list(answers[0].headers) == list(answers[1].headers)
    same(ask(http, "plain", body), expected)


def test_idle_connections_are_closed_and_busy_ones_are_not(url, three, gate, monkeypatch):
    real = Connection.__init__

    def impatient(self, *given, **settings):
        real(self, *given, **settings)
        self.timeout_keep_alive = 0.6

    monkeypatch.setattr(Connection, "__init__", impatient)
    bodies, answers = three
    with Wire(url) as wire:
        gate.set()
        for _ in range(4):  # longer than the timeout together, but never idle for so long
            wire.send(message(bodies[0]), pause=0.2)
            same(wire.answer(), answers[0])
        started = time.monotonic()
        assert wire.answer() is None
        assert 0.05 < time.monotonic() - started < 10
    with Wire(url) as wire:
        wire.send(message(bodies[0]))
        same(wire.answer(), answers[0])
        gate.clear()
        wire.send(message(bodies[1]), pause=1.2)  # one that is computed for longer
        gate.set()
        same(wire.answer(), answers[1])
        wire.send(message(bodies[2])[:-1], pause=1.2)  # and one that comes slowly
        wire.send(message(bodies[2])[-1:])
        same(wire.answer(), answers[2])


def test_the_queue_and_the_end_are_those_of_the_ordinary_way(tmp_path, engines, taken, rng, gate):
    body = body_of(rng.standard_normal((1, 4, 8)).astype(np.float32))
    with live_server(tmp_path, max_queue=1) as url, httpx.Client(base_url=url) as http:
        post(http, "/v1/modules", name="plain", config={"d_model": 8, "num_heads": 2}, seed=1)
        gate.set()
        expected = introduce(http, "plain", body)
        gate.clear()
        gate.begun.clear()
        wires = [Wire(url) for _ in range(3)]
        for wire in wires[:2]:
            wire.send(message(body))
        assert soon(lambda: gate.begun and engines[0].budget.waiting == 1)
        refused = [problem(ask(http, "plain", body)), problem(ask(http, "plain", body, **ORDINARY))]
        for each in refused:
            each.pop("request_id")
        assert refused[0] == refused[1]
        assert refused[0]["code"] == "overloaded"
        wires[2].send(message(body)[:-4])
        engines[0].drain()
        assert problem(ask(http, "plain", body))["code"] == "draining"
        threading.Timer(0.3, lambda: (wires[2].send(message(body)[-4:]), gate.set())).start()
    answers = [wire.answer() for wire in wires]
    for answer in answers[:2]:
        assert answer.headers.pop("connection") == "close"
        same(answer, expected)
    assert problem(answers[2])["code"] == "draining"
    assert engines[0].budget.in_flight == 0
    for wire in wires:
        assert wire.answer() is None
        wire.close()

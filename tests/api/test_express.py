"""Express: what is answered by what was found before is answered as the ordinary way answers it.

``prefer`` makes a request go the ordinary way, and says nothing that bears on an answer here.
"""

import gc
import itertools
import json
import re
import socket
import threading
import time
import weakref
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import safetensors.numpy
from ml_dtypes import bfloat16

from attention_contract.wire import JSON, SAFETENSORS
from attention_service.api import app as app_module
from attention_service.api import express, problems
from attention_service.api.connection import Connection
from attention_service.api.express import Asked, Express
from attention_service.modules.resident import Module
from attention_service.runtime.direct import Direct
from attention_service.runtime.engine import Engine
from attention_service.runtime.execution import Execution
from tests.api.talk import post, problem
from tests.conftest import live_server

ORDINARY = {"prefer": "handling=lenient"}
CAUSAL = {"masks": [{"name": "causal"}]}
CONFIGS = {
    "plain": {},
    "causal": {"spec": CAUSAL},
    "aligned": {"spec": {"masks": [{"name": "causal", "align": "bottom_right"}]}},
    "grouped": {"num_kv_heads": 1, "bias": False, "spec": CAUSAL},
    "scaled": {"spec": {"score": {"name": "dot"}, "normalizer": {"name": "softmax", "temperature": 3.0}}},
    "window": {"spec": {"masks": [{"name": "sliding_window", "left": 1}], "position": {"name": "rope"}}},
    "double": {"dtype": "float64"},
    "half": {"dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server with a module of each config, of width 8 with 2 heads; and its express."""
    made = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(app_module, "Express", lambda *given: made.append(Express(*given)) or made[-1])
        with live_server(tmp_path_factory.mktemp("models")) as url:
            with httpx.Client(base_url=url) as http:
                for name, more in CONFIGS.items():
                    post(http, "/v1/modules", name=name, config={"d_model": 8, "num_heads": 2} | more, seed=1)
            yield url, made[0]


@pytest.fixture
def url(served):
    """The URL of that server; express remembers nothing of former tests."""
    url, express = served
    express._known.clear()
    express._vain.clear()
    return url


@pytest.fixture
def http(url):
    with httpx.Client(base_url=url, timeout=60) as http:
        yield http


@pytest.fixture
def taken(monkeypatch):
    """Of each forward request, whether express answered it or it went the ordinary way: noted before it is answered."""
    seen, answer, ordinary = [], Connection.answer, Connection._make_scope

    def answered(self, *given):
        seen.append(True)
        answer(self, *given)

    def went(self):
        if b"/forward" in self.url:
            seen.append(False)
        ordinary(self)

    monkeypatch.setattr(Connection, "answer", answered)
    monkeypatch.setattr(Connection, "_make_scope", went)
    return seen


@pytest.fixture
def waits(monkeypatch):
    """What express began to answer."""
    seen, real = [], Express.take
    monkeypatch.setattr(Express, "take", lambda self, *given: seen.append(real(self, *given)) or seen[-1])
    return seen


def body_of(query, request=None, **more):
    return safetensors.numpy.save({"query": query} | more, {"request": json.dumps(request or {})})


def ask(http, name, body, **headers):
    return http.post(f"/v1/modules/{name}/forward", content=body, headers={"content-type": SAFETENSORS} | headers)


def introduce(http, name, body):
    """Have express know what a body says: it learns what comes again."""
    for _ in range(2):
        answer = ask(http, name, body)
        assert answer.status_code == 200, answer.text
    return answer


def told(answer):
    """What an answer says beside its tensors, its times and what is its own: status, headers, and the rest."""
    size = int.from_bytes(answer.content[:8], "little")
    rest = json.loads(json.loads(answer.content[8 : 8 + size])["__metadata__"]["reply"])
    times = [name for name in rest["ran"] if name.endswith("_ms")]
    assert all(isinstance(rest["ran"].pop(name), float) for name in times)
    assert size % 8 == 0
    own = {"date", "content-length", "x-request-id"}
    headers = {name: value for name, value in answer.headers.items() if name not in own}
    assert own <= set(answer.headers)
    return answer.status_code, headers, rest, sorted(times)


def output_of(answer):
    size = int.from_bytes(answer.content[:8], "little")
    header = json.loads(answer.content[8 : 8 + size])
    dtype = {"F32": np.float32, "F64": np.float64, "BF16": bfloat16}[header["output"]["dtype"]]
    return np.frombuffer(answer.content[8 + size :], dtype).reshape(header["output"]["shape"])


def same(found, expected):
    assert told(found) == told(expected)
    mine, other = output_of(found), output_of(expected)
    assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
    close = {8: 1e-12, 4: 1e-5, 2: 2e-2}[mine.itemsize]
    np.testing.assert_allclose(mine.astype(np.float64), other.astype(np.float64), rtol=close, atol=close)


def inputs(rng, kind, dtype):
    x = {"query": (2, 5, 8)}
    match kind:
        case "one sequence":
            x = {"query": (5, 8)}
        case "keys":
            x |= {"key": (2, 7, 8)}
        case "keys and values":
            x |= {"key": (2, 3, 8), "value": (2, 3, 8)}
        case "values":
            x |= {"value": (2, 5, 8)}
        case "nothing":
            x = {"query": (0, 5, 8)}
        case "large":
            x = {"query": (3, 700, 8)}  # in several pieces, and sent in two
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in x.items()}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["batch", "one sequence", "keys", "keys and values", "values", "nothing", "large"])
def test_the_answers_are_those_of_the_ordinary_way(http, taken, rng, name, kind):
    for dtype in (np.float32, np.float64, bfloat16):
        bodies = [body_of(**inputs(rng, kind, dtype)) for _ in range(3)]
        expected = [ask(http, name, body, **ORDINARY) for body in bodies]
        introduce(http, name, bodies[0])
        taken.clear()
        for body, other in zip(bodies, expected, strict=True):
            same(ask(http, name, body), other)
        assert taken == [True] * 3


@pytest.mark.parametrize("number", [np.nan, np.inf, 3e38, 1e30])
@pytest.mark.parametrize("name", ["plain", "causal", "grouped", "aligned"])
def test_what_is_not_finite_harms_only_those_who_look_at_it(http, taken, rng, name, number):
    x = rng.standard_normal((2, 5, 8)).astype(np.float32)
    introduce(http, name, body_of(x))
    introduce(http, name, body_of(x, key=x))
    taken.clear()
    for place in ((0, 4, 0), (1, 0, 7)):
        x = rng.standard_normal((2, 5, 8)).astype(np.float32)
        x[place] = number
        expected = ask(http, name, body_of(x), **ORDINARY)
        same(ask(http, name, body_of(x)), expected)
        query = rng.standard_normal((2, 5, 8)).astype(np.float32)
        expected = ask(http, name, body_of(query, key=x), **ORDINARY)
        same(ask(http, name, body_of(query, key=x)), expected)
        expected = ask(http, name, body_of(x, key=query), **ORDINARY)
        same(ask(http, name, body_of(x, key=query)), expected)
    assert taken == [False, True] * 6


def test_a_number_too_large_for_the_module_is_refused_as_ever(http, taken, rng):
    x = rng.standard_normal((2, 5, 8))
    introduce(http, "plain", body_of(x))
    x[1, 2, 3] = 1e300
    taken.clear()
    mine, other = problem(ask(http, "plain", body_of(x))), problem(ask(http, "plain", body_of(x), **ORDINARY))
    assert taken == [True, False]
    for each in (mine, other):
        assert each.pop("request_id")
    assert mine == other
    assert (mine["status"], mine["param"]) == (422, "query")


def test_tensors_may_lie_anywhere(http, taken, rng):
    x = rng.standard_normal((2, 5, 8)).astype(np.float32)
    for gap in range(4):
        header = json.dumps(
            {"query": {"dtype": "F32", "shape": [2, 5, 8], "data_offsets": [0, x.nbytes]}}, separators=(",", ":")
        ).encode()
        header += b" " * (gap - len(header) % 4 + 4)
        body = len(header).to_bytes(8, "little") + header + x.tobytes()
        expected = introduce(http, "causal", body)
        same(ask(http, "causal", body), expected)
    assert taken == [False, True, True] * 4


def test_ids_are_kept_or_made(http, taken, rng):
    body = body_of(rng.standard_normal((1, 3, 8)).astype(np.float32))
    introduce(http, "plain", body)
    taken.clear()
    for given, kept in (("mine", True), ("mine", True), ("yours", True), (None, False), ("bad id", False)):
        answer = ask(http, "plain", body, **({} if given is None else {"x-request-id": given}))
        assert (answer.headers["x-request-id"] == given) is kept
        assert kept or re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    made = {ask(http, "plain", body).headers["x-request-id"] for _ in range(5)}
    assert len(made) == 5
    assert all(taken)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"accept": "application/json"}, 200),
        ({"accept": "text/html"}, 406),
        ({"content-type": "text/plain"}, 415),
        ({"content-encoding": "identity"}, 200),
        ({"content-encoding": "gzip"}, 400),
        ({"if-match": "*"}, 200),
        ({"if-match": '"other"'}, 409),
        ({"prefer": "wait=0"}, 503),
        ({"x-long": "x" * 20_000}, 422),
    ],
)
def test_whatever_is_not_as_it_was_goes_the_ordinary_way(http, taken, rng, headers, status):
    body = body_of(rng.standard_normal((1, 3, 8)).astype(np.float32))
    for _ in range(2):
        ask(http, "plain", body)
    taken.clear()
    for _ in range(2):
        answer = ask(http, "plain", body, **headers)
        assert answer.status_code == status or (status, answer.status_code) == (503, 504), answer.text
    assert not any(taken)


def test_headers_that_say_nothing_of_the_answer_may_be_others_each_time(http, taken, rng):
    body = body_of(rng.standard_normal((1, 3, 8)).astype(np.float32))
    expected = introduce(http, "plain", body)
    taken.clear()
    for trace in range(5):
        same(ask(http, "plain", body, traceparent=f"00-{trace:032x}"), expected)
    assert taken == [True] * 5


def test_other_paths_are_none_of_its_business(http, taken, rng):
    body = body_of(rng.standard_normal((1, 3, 8)).astype(np.float32))
    for _ in range(2):
        answers = [
            http.post(f"/v1/modules/{path}", content=body, headers={"content-type": SAFETENSORS}).status_code
            for path in ("pl%61in/forward", "plain/forward?x=/forward", "plain/weights", "no/forward", "a/b/forward")
        ]
        assert answers == [200, 200, 200, 404, 404]
        assert http.put("/v1/modules/plain/forward", content=body).status_code == 405
    assert not any(taken)


@pytest.mark.parametrize(
    "request_fields",
    [{"return": ["weights"]}, {"return": ["output", "lse"]}, {"select": {"heads": [0]}}, {"query": [[0.5] * 8]},
     {"edits": [{"tap": "weights", "heads": [0], "set": 0}]}, {"dropout": {"p": 0.5, "seed": 1}}],
    ids=str,
)  # fmt: skip
def test_requests_for_more_go_the_ordinary_way(http, taken, rng, request_fields):
    x = rng.standard_normal((1, 3, 8)).astype(np.float32)
    tensors = {"key": x, "value": x} if "query" in request_fields else {"query": x}
    body = safetensors.numpy.save(tensors, {"request": json.dumps(request_fields)})
    answers = [ask(http, "plain", body).status_code for _ in range(3)]
    assert len(set(answers)) == 1
    assert not any(taken)


def test_the_version_that_a_body_names_is_held_to(http, taken, rng):
    x = rng.standard_normal((1, 3, 8)).astype(np.float32)
    version = http.get("/v1/modules/plain").json()["version"]
    taken.clear()
    assert [ask(http, "plain", body_of(x, {"version": version})).status_code for _ in range(3)] == [200] * 3
    assert [problem(ask(http, "plain", body_of(x, {"version": "other"})))["status"] for _ in range(2)] == [409, 409]
    assert taken == [False, True, True, False, False]


def test_a_module_that_is_another_now_is_found_anew(http, taken, rng):
    body = body_of(rng.standard_normal((1, 3, 8)).astype(np.float32))
    config = {"d_model": 8, "num_heads": 2, "bias": False}

    def make(seed):
        return post(http, "/v1/modules", name="changing", config=config, seed=seed)["version"]

    first = make(1)
    before = [ask(http, "changing", body) for _ in range(2)][1]
    parameters = {f"{role}_proj.weight": np.eye(8).tolist() for role in "qkvo"}
    assert http.put("/v1/modules/changing/parameters", json={"parameters": parameters}).status_code == 200
    taken.clear()
    after = [ask(http, "changing", body) for _ in range(3)]
    same(after[2], ask(http, "changing", body, **ORDINARY))
    assert taken == [False, False, True, False]
    assert told(after[0])[2]["ran"]["version"] == told(after[2])[2]["ran"]["version"] != first
    assert not np.allclose(output_of(after[0]), output_of(before))
    assert http.delete("/v1/modules/changing").status_code == 204
    assert [problem(ask(http, "changing", body))["code"] for _ in range(2)] == ["module_not_found"] * 2
    assert make(2) != first
    other = [ask(http, "changing", body) for _ in range(3)]
    assert not np.allclose(output_of(other[2]), output_of(before))
    http.delete("/v1/modules/changing")
    make(1)
    for _ in range(3):
        same(ask(http, "changing", body), before)
    assert taken[-1]
    http.delete("/v1/modules/changing")


def test_nothing_of_a_deleted_module_or_of_a_request_is_kept(http, taken, rng):
    body = body_of(rng.standard_normal((1, 3, 8)).astype(np.float32))
    post(http, "/v1/modules", name="brief", config={"d_model": 8, "num_heads": 2}, seed=3)
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            ask(http, "brief", body)
        assert sum(taken) >= 19
        (module,) = [weakref.ref(x) for x in gc.get_objects() if isinstance(x, Module) and x.name == "brief"]
        assert sum(isinstance(x, Asked) for x in gc.get_objects()) <= 1
        http.delete("/v1/modules/brief")
        assert soon(lambda: module() is None)
    finally:
        gc.enable()


def test_little_is_remembered_of_what_is_asked(served, url, http, monkeypatch, rng):
    monkeypatch.setattr(express, "MOST", 8)
    x = rng.standard_normal((1, 30, 8)).astype(np.float32)
    for length in range(1, 31):
        for accept in ("*/*", "application/json", "*/*;" + "x" * 5000):
            for _ in range(2):
                ask(http, "plain", body_of(x[:, :length]), accept=accept, cookie="secret")
        ask(http, f"no-{length}", body_of(x), cookie="secret")
    remembered = served[1]
    for each in (remembered._known, remembered._vain):
        assert 0 < len(each) <= 8
        for key in each:
            assert len(repr(key)) < 6000
            assert "secret" not in repr(key)


def test_each_request_is_counted_and_logged_once(http, taken, rng, capsys):
    bodies = [body_of(rng.standard_normal((1, 3, 8)).astype(np.float32)) for _ in range(10)]

    def counted():
        text = http.get("/metrics").text
        return [
            float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1])
            for name in (
                'attention_requests_total{operation="forward",status="200"}',
                'attention_request_seconds_count{operation="forward"}',
                'attention_request_seconds_bucket{le="+Inf",operation="forward"}',
            )
            for name in [re.escape(name)]
        ]

    introduce(http, "plain", bodies[0])
    taken.clear()
    before = counted()
    capsys.readouterr()
    ids = [ask(http, "plain", body).headers["x-request-id"] for body in bodies]
    assert counted() == [number + 10 for number in before]
    assert taken == [True] * 10
    lines = capsys.readouterr().err.splitlines()
    for identity in ids:
        (line,) = [line for line in lines if identity in line]
        for part in ("method=POST", "operation=forward", "path=/v1/modules/plain/forward", "status=200"):
            assert part in line


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def ask_json(http, name, text, **headers):
    content = text if isinstance(text, str) else json.dumps(text)
    return http.post(f"/v1/modules/{name}/forward", content=content, headers={"content-type": JSON} | headers)


def same_json(found, expected):
    """Also in how the numbers are written, but for the times."""
    assert found.status_code == expected.status_code == 200
    mine, other = found.json(), expected.json()
    times = [{name: ran.pop(name) for name in list(ran) if name.endswith("_ms")} for ran in (mine["ran"], other["ran"])]
    assert times[0].keys() == times[1].keys()
    assert all(isinstance(value, float) and value >= 0 for value in times[0].values())
    outputs = [np.array(each.pop("output"), dtype=np.float64) for each in (mine, other)]
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)
    assert mine == other
    own = {"date", "content-length", "x-request-id"}
    for name in {*found.headers, *expected.headers} - own:
        assert found.headers[name] == expected.headers[name]


@pytest.mark.parametrize("name", ["plain", "aligned", "double", "half"])
@pytest.mark.parametrize("kind", ["batch", "one sequence", "keys and values"])
def test_json_is_answered_as_by_the_ordinary_way(http, taken, rng, name, kind):
    for shown in (lambda x: x, lambda x: np.round(x * 9).astype(int)):
        bodies = [{k: shown(x).tolist() for k, x in inputs(rng, kind, np.float64).items()} for _ in range(3)]
        for _ in range(2):
            assert ask_json(http, name, bodies[0]).status_code == 200
        expected = [ask_json(http, name, body, **ORDINARY) for body in bodies]
        taken.clear()
        for body, other in zip(bodies, expected, strict=True):
            same_json(ask_json(http, name, body), other)
        assert taken == [True] * 3


def test_json_that_says_something_else_is_not_taken_for_the_same(http, taken, rng):
    x = rng.standard_normal((1, 3, 8)).tolist()
    known = {"query": x, "average_heads": False, "return": ["output"]}
    for _ in range(3):
        assert ask_json(http, "plain", known).status_code == 200
    assert taken[-1]
    others = [
        known | {"average_heads": 0},
        known | {"average_heads": 0.0},
        known | {"average_heads": True},
        known | {"return": "output"},
        known | {"return": ["output", "output"]},
        known | {"other": 1},
        known | {"version": "other"},
        known | {"query": [[[*row[:-1], "NaN"] for row in x[0]]]},
        known | {"query": [[[*row[:-1], None] for row in x[0]]]},
        known | {"query": [[[*row[:-1], True] for row in x[0]]]},
        known | {"query": [[[*row[:-1], 1e400] for row in x[0]]]},
        known | {"query": [[[*row[:-1], 1e39] for row in x[0]]]},
        known | {"query": [[x[0][0], x[0][1], x[0][2][:-1]]]},
        known | {"query": x[0][0]},
        known | {"query": [*x, []]},
        known | {"query": {"dtype": "float32", "shape": [1, 3, 8], "data": [0.5] * 24}},
        known | {"encoding": "base64"},
        json.dumps(known)[:-1] + ', "select": ' + '{"a":' * 1000 + "1" + "}" * 1000 + "}",
        {"query": [[[0.5] * 8]] * 6000},  # more rows than are read on the event loop
        json.dumps(known) + "x",
        json.dumps(known)[:-1] + ', "query": [[[1, 2, 3, 4, 5, 6, 7, 8]]]}',
        json.dumps(known).replace("output", "outpu\u0074"),
        "\ufeff" + json.dumps(known),
    ]
    for other in others:
        expected, found = ask_json(http, "plain", other, **ORDINARY), ask_json(http, "plain", other)
        assert found.status_code == expected.status_code, (found.text, expected.text)
        if found.status_code == 200:
            mine, theirs = found.json()["output"], expected.json()["output"]
            assert mine == theirs or np.allclose(
                np.array(mine, dtype=float), np.array(theirs, dtype=float), equal_nan=True
            )
        else:
            documents = [problem(found), problem(expected)]
            assert documents[0].pop("request_id") != documents[1].pop("request_id")
            assert documents[0] == documents[1]
        ask_json(http, "plain", known)
    assert taken[-1]


def test_requests_that_cannot_be_known_do_not_shut_out_those_that_can(http, taken, rng, monkeypatch):
    monkeypatch.setattr(express, "_PASSED_OVER", 10)
    good = {"query": rng.standard_normal((1, 3, 8)).tolist()}
    bad = good | {"return": ["weights"]}
    for _ in range(3):
        assert ask_json(http, "plain", bad).status_code == 200
    for _ in range(3):
        assert ask_json(http, "plain", good).status_code == 200
    assert taken[-1]
    taken.clear()
    with httpx.Client(base_url=http.base_url) as other:
        for _ in range(20):
            ask_json(other, "plain", bad)
        assert not any(taken)
        for _ in range(15):
            ask_json(other, "plain", good)
        assert taken[-1]


def soon(holds, seconds=5.0):
    """Whether something comes to hold."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


# ── on the wire ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Wire:
    """A connection as it is, without a library between."""

    def __init__(self, url):
        place = urlsplit(url)
        self.socket = socket.create_connection((place.hostname, place.port), timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.socket.makefile("rb")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._file.close()
        self.socket.close()

    def send(self, *pieces, pause=0.02):
        for piece in pieces:
            self.socket.sendall(piece)
            time.sleep(pause)

    def answer(self):
        """The next answer; None where the connection was closed instead."""
        line = self._file.readline()
        if not line:
            return None
        headers = []
        while header := self._file.readline().strip():
            name, _, value = header.decode().partition(": ")
            headers.append((name, value))
        content = self._file.read(int(dict(headers)["content-length"]))
        return httpx.Response(int(line.split()[1]), headers=headers, content=content)


def message(body, *more, name="plain", version="1.1", length=True):
    lines = [
        f"POST /v1/modules/{name}/forward HTTP/{version}",
        "host: here",
        "accept: */*",
        f"content-type: {SAFETENSORS}",
        *more,
    ]
    lines += [f"content-length: {len(body)}"] * length
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.fixture
def three(http, rng):
    """Three requests that express knows, and their answers."""
    bodies = [body_of(rng.standard_normal((1, 4, 8)).astype(np.float32)) for _ in range(3)]
    introduce(http, "plain", bodies[0])
    answers = [ask(http, "plain", body) for body in bodies]
    return bodies, answers


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


@pytest.fixture
def gate(monkeypatch):
    """Holds up every pass, on the device's thread, until it is opened."""
    opened, real = threading.Event(), Direct.run
    opened.begun = []

    def run(self, bound):
        opened.begun.append(bound.batch)
        assert opened.wait(20)
        return real(self, bound)

    monkeypatch.setattr(Direct, "run", run)
    monkeypatch.setattr(Execution, "_stays", lambda *_: False)
    yield opened
    opened.set()


def test_those_that_wait_run_together_and_each_gets_its_own(url, http, waits, rng, gate):
    bodies = [body_of(rng.standard_normal((1, length, 8)).astype(np.float32)) for length in (4, 4, 4, 3, 4)]
    gate.set()
    for body in bodies:
        introduce(http, "plain", body)
    expected = [ask(http, "plain", body) for body in bodies]
    gate.clear()
    gate.begun.clear()
    waits.clear()
    wires = [Wire(url) for _ in bodies]
    try:
        for wire, body in zip(wires, bodies, strict=True):
            wire.send(message(body))
        assert soon(lambda: len(waits) == 5 and gate.begun)
        gate.set()
        answers = [wire.answer() for wire in wires]
    finally:
        for wire in wires:
            wire.close()
    assert None not in waits
    batches = []
    for answer, other in zip(answers, expected, strict=True):
        mine, theirs = told(answer), told(other)
        batches.append(mine[2]["ran"].pop("batch"))
        assert theirs[2]["ran"].pop("batch") == 1
        assert mine == theirs
        np.testing.assert_allclose(output_of(answer), output_of(other), rtol=1e-5, atol=1e-6)
    assert batches[0] == 1
    assert max(batches) == len(batches) - 1


def test_a_caller_who_went_away_is_not_waited_for(url, http, waits, three, gate, capsys):
    bodies, answers = three
    waits.clear()
    with Wire(url) as first, Wire(url) as third:
        first.send(message(bodies[0]))
        assert soon(lambda: len(gate.begun) == 1)
        gone = Wire(url)
        gone.send(message(bodies[1], "x-request-id: gone"))
        third.send(message(bodies[2]))
        assert soon(lambda: len(waits) == 3)
        assert None not in waits
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
        patched.setattr(Direct, "run", fails)
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
        self.timeout_keep_alive = 0.3

    monkeypatch.setattr(Connection, "__init__", impatient)
    bodies, answers = three
    with Wire(url) as wire:
        gate.set()
        for _ in range(4):  # longer than the timeout together, but never idle for so long
            wire.send(message(bodies[0]), pause=0.15)
            same(wire.answer(), answers[0])
        started = time.monotonic()
        assert wire.answer() is None
        assert 0.05 < time.monotonic() - started < 2
    with Wire(url) as wire:
        wire.send(message(bodies[0]))
        same(wire.answer(), answers[0])
        gate.clear()
        wire.send(message(bodies[1]), pause=0.8)  # one that is computed for longer
        gate.set()
        same(wire.answer(), answers[1])
        wire.send(message(bodies[2])[:-1], pause=0.8)  # and one that comes slowly
        wire.send(message(bodies[2])[-1:])
        same(wire.answer(), answers[2])


def test_an_ordinary_request_behind_one_that_was_answered_at_once_is_not_idle(url, http, three, gate, monkeypatch):
    bodies, answers = three
    ordinary = message(bodies[1], "prefer: handling=lenient")
    monkeypatch.setattr(Execution, "_stays", lambda *_: gate.is_set())
    gate.set()
    real = Connection.__init__

    def impatient(self, *given, **settings):
        real(self, *given, **settings)
        self.timeout_keep_alive = 0.3

    monkeypatch.setattr(Connection, "__init__", impatient)
    with Wire(url) as wire:
        wire.send(message(bodies[0]))
        same(wire.answer(), answers[0])
        wire.send(message(bodies[0]) + ordinary, pause=0)
        gate.clear()
        time.sleep(0.8)
        gate.set()
        same(wire.answer(), answers[0])
        same(wire.answer(), answers[1])


# ── limits and the end ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def engines(monkeypatch):
    """The engines of servers that are started from here on."""
    made = []
    monkeypatch.setattr(app_module, "Engine", lambda *given: made.append(Engine(*given)) or made[-1])
    return made


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

"""Express: what is answered by what was found before is answered as the ordinary way answers it."""

import json
import re

import numpy as np
import pytest
import safetensors.numpy
from ml_dtypes import bfloat16

from attention_contract.wire import SAFETENSORS
from tests.api.express.talk import CONFIGS, ORDINARY, ask, body_of, inputs, introduce, same
from tests.api.talk import problem


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

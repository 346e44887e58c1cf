"""Express answers requests in JSON as the ordinary way does."""

import base64
import json

import httpx
import numpy as np
import pytest

from attention_contract.wire import JSON
from attention_service.api import express
from tests.api.express.talk import ORDINARY, inputs
from tests.api.talk import problem


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


def test_of_names_that_come_twice_the_last_one_counts(http, rng):
    """Also where it is no list of numbers, and the one before it is."""
    x, other = (rng.standard_normal((1, 3, 8)).astype(np.float32) for _ in range(2))
    said = {"dtype": "float32", "shape": [1, 3, 8], "base64": base64.b64encode(x.tobytes()).decode()}
    expected = ask_json(http, "plain", {"query": x.tolist()}).json()["output"]
    for first in (other.tolist(), [[1.5, 2.5]]):
        for last in (said, x.tolist()):
            text = f'{{"query": {json.dumps(first)}, "query": {json.dumps(last)}}}'
            for _ in range(4):
                found = ask_json(http, "plain", text)
                assert found.status_code == 200, found.text
                np.testing.assert_allclose(found.json()["output"], expected, rtol=1e-5, atol=1e-6)
    text = (
        f'{{"key": {json.dumps(other.tolist())}, "query": {json.dumps(x.tolist())}, "key": {json.dumps(x.tolist())}}}'
    )
    for _ in range(4):
        np.testing.assert_allclose(ask_json(http, "plain", text).json()["output"], expected, rtol=1e-5, atol=1e-6)

"""Forward over HTTP: the numbers of PyTorch, the layouts of the contract, and what it refuses."""

import numpy as np
import pytest

from tests.api.talk import post, refuse

Q = [[1, 0], [0, 1]]
K = [[1, 0], [0, 1], [1, 1]]
V = [[1, 2], [3, 4], [5, 6]]
DOT = {"score": {"name": "dot"}}


def test_the_attention_that_is_followed_by_hand(http):
    reply = post(
        http, "/v1/attention/forward", query=Q, key=K, value=V, spec=DOT, **{"return": ["scores", "weights", "output"]}
    )
    assert reply["scores"] == [[1, 0, 1], [0, 1, 1]]
    np.testing.assert_allclose(reply["weights"], [[0.4223, 0.1554, 0.4223], [0.1554, 0.4223, 0.4223]], atol=5e-5)
    # The published 3.5338 and 4.5338 come from weights rounded to four digits.
    np.testing.assert_allclose(reply["output"], [[3, 4], [3.5338, 4.5338]], atol=2e-4)
    assert reply["ran"]["dtype"] == "float32"


def test_taps_do_not_change_the_output_and_selection_narrows_them(http, rng):
    q = rng.normal(size=(2, 4, 9, 8)).tolist()
    plain = post(http, "/v1/attention/forward", query=q)
    taps = ["q", "k", "v", "scores", "capped_scores", "masked_scores", "weights", "context", "lse", "output"]
    every = post(http, "/v1/attention/forward", query=q, **{"return": taps})
    some = post(http, "/v1/attention/forward", query=q, select={"heads": [3, 1], "queries": [0, 8]}, **{"return": taps})
    assert plain["output"] == every["output"] == some["output"]
    assert plain["ran"]["kernel"] == every["ran"]["kernel"] == "fused"
    for tap in ("scores", "weights", "context", "q"):
        np.testing.assert_allclose(some[tap], np.array(every[tap])[:, [3, 1]][:, :, [0, 8]], atol=1e-6)
    np.testing.assert_allclose(some["k"], np.array(every["k"])[:, [3, 1]], atol=1e-6)
    averaged = post(http, "/v1/attention/forward", query=q, average_heads=True, **{"return": ["weights"]})
    np.testing.assert_allclose(averaged["weights"], np.array(every["weights"]).mean(1), atol=1e-6)
    assert "output" not in averaged


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({}, 422, "invalid_request", "query"),
        ({"query": [[1, 2], [3]]}, 422, "invalid_tensor", "query"),
        ({"query": [1.0]}, 422, "shape_mismatch", "query"),
        ({"query": Q, "key": [[1, 0, 0]]}, 422, "shape_mismatch", "key"),
        ({"query": Q, "key": K, "value": Q}, 422, "shape_mismatch", "value"),
        ({"query": Q, "mask": [[True, True, True, True]]}, 422, "shape_mismatch", "mask"),
        ({"query": Q, "key_mask": [True]}, 422, "shape_mismatch", "key_mask"),
        ({"query": [[Q]], "key_lengths": [7]}, 422, "invalid_request", "key_lengths"),
        ({"query": Q, "past_key": [[1, 0]]}, 422, "invalid_request", "past_value"),
        ({"query": Q, "positions": [[0, 1]]}, 422, "invalid_request", "positions"),
        ({"query": Q, "return": ["wieghts"]}, 422, "invalid_request", "return.0"),
        ({"query": Q, "return": ["weights"], "select": {"heads": [1]}}, 422, "invalid_request", "select.heads"),
        ({"query": Q, "return": ["weights"], "select": {"queries": [2]}}, 422, "invalid_request", "select.queries"),
        ({"query": Q, "edits": [{"tap": "weights", "heads": [4], "set": 0}]}, 422, "invalid_request", "edits.0.heads"),
        ({"query": Q, "edits": [{"tap": "q", "keys": [0], "set": 0}]}, 422, "invalid_request", "edits.0.keys"),
        ({"query": Q, "edits": [{"tap": "q"}]}, 422, "invalid_request", "edits.0"),
        ({"query": Q, "kernel": "fused", "spec": {"softcap": 5}}, 422, "kernel_unsuitable", "kernel"),
        ({"query": Q, "version": "x"}, 422, "invalid_request", "version"),
        ({"query": Q, "parameters": {"score.weight": [1]}}, 422, "invalid_request", "parameters.score.weight"),
        ({"query": Q, "num_heads": 3}, 422, "shape_mismatch", "query"),
        ({"query": Q, "num_kv_heads": 1}, 422, "invalid_request", "num_kv_heads"),
        ({"query": Q, "spec": {"score": {"name": "rope"}}}, 422, "invalid_request", "spec.score"),
        (
            {"query": {"dtype": "float32", "shape": [1, 2], "data": [1, 2]},
             "key": {"dtype": "float64", "shape": [1, 2], "data": [1, 2]}},
            422, "invalid_tensor", "key",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_and_named(http, body, status, code, param):
    problem = refuse(http, "/v1/attention/forward", **body)
    assert (problem["status"], problem["code"], problem.get("param")) == (status, code, param)


def test_a_number_too_large_for_the_module_is_refused_and_harms_nobody(http):
    config = {"d_model": 2, "num_heads": 1, "dtype": "float16"}
    assert http.post("/v1/modules", json={"name": "half", "config": config}).status_code == 201
    problem = refuse(http, "/v1/modules/half/forward", query=[[1e6, 0]])
    assert (problem["status"], problem["param"]) == (422, "query")
    assert len(post(http, "/v1/modules/half/forward", query=[[1.0, 0]])["output"]) == 1

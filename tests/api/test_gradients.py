"""Gradients over HTTP: the closed forms, autograd through independent code, and central differences."""

import numpy as np
import pytest

from tests.api.talk import post, refuse

Q = [[1, 0], [0, 1]]
K = [[1, 0], [0, 1], [1, 1]]
V = [[1, 2], [3, 4], [5, 6]]
DOT = {"score": {"name": "dot"}}
DOUBLE = "float64"


def typed(array, dtype=DOUBLE):
    array = np.asarray(array)
    return {"dtype": dtype, "shape": list(array.shape), "data": array.ravel().tolist()}


def test_closed_forms(http):
    upstream = [[1, 0], [0, 1]]
    reply = post(
        http, "/v1/attention/gradients", query=typed(Q), key=typed(K), value=typed(V), spec=DOT,
        upstream=typed(upstream), wrt=["query", "key", "value", "weights", "scores", "context"],
        check=True, **{"return": ["weights", "output"]},
    )  # fmt: skip
    q, k, v, do = (np.array(x, float) for x in (Q, K, V, upstream))
    a = np.exp(q @ k.T) / np.exp(q @ k.T).sum(-1, keepdims=True)
    d_a = do @ v.T
    d_s = a * (d_a - (a * d_a).sum(-1, keepdims=True))
    expected = {"value": a.T @ do, "weights": d_a, "scores": d_s, "query": d_s @ k, "key": d_s.T @ q, "context": do}
    for name, gradient in expected.items():
        np.testing.assert_allclose(reply["gradients"][name], gradient, atol=1e-14, err_msg=name)
    np.testing.assert_allclose(reply["weights"], a, atol=1e-15)
    assert set(reply["check"]) == set(expected)
    assert all(row["passed"] and row["elements"] for row in reply["check"].values())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"wrt": ["key"]}, "wrt.0"),
        ({"wrt": ["query", "mask"], "mask": [[True, True]]}, "wrt.1"),
        ({"wrt": ["nonsense"]}, "wrt.0"),
        ({"wrt": ["parameters"]}, "wrt.0"),
        ({"wrt": ["lse"]}, "wrt.0"),
        ({"upstream": [[1, 1, 1]]}, "upstream"),
        ({"wrt": ["scores"], "kernel": "fused"}, "kernel"),
    ],
)
def test_what_has_no_gradient_is_refused(http, body, param):
    assert refuse(http, "/v1/attention/gradients", query=Q, **body)["param"] == param


def test_a_gradient_that_is_no_number_does_not_pass_the_check(http):
    reply = post(http, "/v1/attention/gradients", query=[[1, "NaN"], [0, 1]], check=True)
    assert reply["check"]["query"]["passed"] is False


GAUSSIAN = {"score": {"name": "gaussian", "sigma": 1e-3}}
FAST = [
    (GAUSSIAN, 1 + np.array([[0, 3e-4], [1e-3, -5e-4], [-8e-4, 1e-3]])),
    (GAUSSIAN, np.array([[1.0, 0.9], [0.3, 1.1], [1.0003, 0.9004]])),
    ({"score": {"name": "gaussian", "sigma": 0.5}}, 2000 + np.array([[0, 0.4], [0.7, -0.2], [-0.3, 0.9]])),
    ({"score": {"name": "cosine", "scale": 5}}, 1e-12 * np.array([[1, 0.4], [0.7, -0.2], [-0.3, 0.9]])),
]


@pytest.mark.parametrize(("spec", "points"), FAST)
def test_the_check_passes_where_the_output_varies_fast(http, rng, spec, points):
    value = rng.normal(size=(3, 2))
    reply = post(
        http, "/v1/attention/gradients", query=typed(points[:2] + 1e-5 * points[1:]), key=typed(points),
        value=typed(value), spec=spec, wrt=["query", "key", "value", "scores"], check=True,
    )  # fmt: skip
    assert all(row["passed"] for row in reply["check"].values()), reply["check"]
    assert np.abs(reply["gradients"]["query"]).max() > 0.1

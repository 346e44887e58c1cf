"""Gradients over HTTP: what has none, and the check by central differences. Core proves the numbers."""

import numpy as np
import pytest

from tests.api.talk import post, refuse

Q = [[1, 0], [0, 1]]
DOUBLE = "float64"


def typed(array, dtype=DOUBLE):
    array = np.asarray(array)
    return {"dtype": dtype, "shape": list(array.shape), "data": array.ravel().tolist()}


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

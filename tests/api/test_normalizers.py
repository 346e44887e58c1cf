"""Normalizers other than the softmax, over HTTP: what they answer, and that none has a log-sum-exp."""

import numpy as np
import pytest

from tests.api.talk import post, refuse

OTHERS = ("sigmoid", "sparsemax", "entmax15")
X = [[1.0, 0.0, 2.0], [0.0, 1.0, 0.0], [3.0, -1.0, 1.0]]


@pytest.fixture(scope="module", params=OTHERS)
def normalizer(request):
    return {"name": request.param}


@pytest.mark.parametrize("question", ["forward", "gradients"])
def test_the_log_sum_exp_is_refused(http, normalizer, question):
    body = {"return": ["output", "lse"]}
    document = refuse(http, f"/v1/attention/{question}", query=X, spec={"normalizer": normalizer}, **body)
    assert (document["status"], document["param"]) == (422, "return.1")
    assert normalizer["name"] in document["detail"]
    assert "lse" in document["detail"]


def test_the_fused_kernel_is_refused(http, normalizer):
    document = refuse(http, "/v1/attention/forward", query=X, spec={"normalizer": normalizer}, kernel="fused")
    assert document["param"] == "kernel"
    assert f"no normalizer {normalizer['name']}" in document["detail"]


def test_statistics_are_of_the_shares_and_the_largest_weight_is_as_it_is(http, normalizer, rng):
    reply = post(http, "/v1/attention/weights", query=rng.normal(size=(2, 6, 4)).tolist(), top_k=6,
                 spec={"normalizer": normalizer})  # fmt: skip
    weights, found = np.array(reply["weights"]), reply["statistics"]
    shares = weights / weights.sum(-1, keepdims=True)
    distance = np.abs(np.arange(6)[:, None] - np.arange(6))
    logs = np.log(np.where(shares > 0, shares, 1))
    expected = {
        "entropy": -(shares * logs).sum(-1),
        "max_weight": weights.max(-1),
        "mean_distance": (shares * distance).sum(-1),
        "first_key": shares[..., 0],
        "own_position": np.diagonal(shares, axis1=-2, axis2=-1),
    }
    for name, rows in expected.items():
        np.testing.assert_allclose(found[name], rows.mean(-1), atol=1e-6, err_msg=name)
    assert (np.array(found["entropy"]) <= np.log(6)).all()
    keys = np.array(reply["top"]["keys"])
    assert ((keys == -1) == (np.array(reply["top"]["weights"]) == 0)).all()
    assert (keys == -1).any() == (normalizer["name"] != "sigmoid")

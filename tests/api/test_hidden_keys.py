"""Gradients at keys that are padding and at keys that a mask forbids, for every kernel and method."""

import numpy as np
import pytest
import torch

from tests.api.talk import post

BATCH, HEADS, LENGTH, D = 2, 2, 6, 4
REAL = np.array([[True, True, False, True, True, False], [True, True, True, True, False, False]])


def typed(array):
    return {
        "dtype": "float64",
        "shape": list(array.shape),
        "data": ["NaN" if x != x else x for x in array.ravel().tolist()],
    }


@pytest.fixture
def tensors(rng):
    return {name: rng.normal(size=(BATCH, HEADS, LENGTH, D)) for name in ("query", "key", "value")}


@pytest.mark.parametrize("masked", ["spec", "mask", "float mask"])
def test_the_gradient_of_weights_knows_padding_from_what_is_forbidden(http, rng, tensors, masked):
    upstream = rng.normal(size=(BATCH, HEADS, LENGTH, D))
    allowed = np.tril(np.ones((LENGTH, LENGTH), bool))
    body = {name: typed(x) for name, x in (tensors | {"upstream": upstream}).items()}
    body |= {
        "spec": {"spec": {"masks": [{"name": "causal"}]}},
        "mask": {"mask": allowed.tolist()},
        "float mask": {"mask": [[0.0 if may else "-Infinity" for may in row] for row in allowed]},
    }[masked]
    found = post(http, "/v1/attention/gradients", **body, key_mask=REAL.tolist(), wrt=["weights", "scores"], check=True)
    expected = torch.tensor(upstream) @ torch.tensor(tensors["value"]).mT * torch.tensor(REAL)[:, None, None]
    np.testing.assert_allclose(found["gradients"]["weights"], expected, atol=1e-12)
    scores = np.array(found["gradients"]["scores"])
    assert (scores[:, :, ~allowed] == 0).all()
    assert (scores.transpose(0, 3, 1, 2)[~REAL] == 0).all()
    assert all(row["passed"] for row in found["check"].values()), found["check"]


@pytest.mark.parametrize("tap", ["k", "v", "scores", "capped_scores", "weights"])
@pytest.mark.parametrize("mask", [{"key_mask": REAL.tolist()}, {"key_lengths": [4, 3]}], ids=["mask", "lengths"])
def test_a_loss_of_taps_has_no_gradient_at_padding(http, rng, tensors, tap, mask):
    """A padded key counts as 0 in every tap, so that numbers at it in ``tap_upstream`` change nothing."""
    real = REAL if "key_mask" in mask else np.arange(LENGTH) < np.array(mask["key_lengths"])[:, None]
    of_keys = tap in {"k", "v"}
    hidden = np.broadcast_to(~(real[:, None, :, None] if of_keys else real[:, None, None]), (BATCH, HEADS, LENGTH, D)
                             if of_keys else (BATCH, HEADS, LENGTH, LENGTH))  # fmt: skip
    upstream = rng.normal(size=hidden.shape)
    body = {name: typed(x) for name, x in tensors.items()} | mask
    found = [
        post(http, "/v1/attention/gradients", **body, wrt=[tap, "query", "key", "value"], tap_upstream={tap: typed(x)})
        for x in (upstream, np.where(hidden, 0, upstream))
    ]
    assert found[0]["gradients"] == found[1]["gradients"]
    assert (np.array(found[0]["gradients"][tap])[hidden] == 0).all()
    assert (np.array(found[0]["gradients"]["key"]).transpose(0, 2, 1, 3)[~real] == 0).all()


@pytest.mark.parametrize("kernel", ["fused", "blocked", "materialized"])
@pytest.mark.parametrize("spec", [{}, {"qk_norm": {}}, {"position": {"name": "rope"}}], ids=["plain", "norm", "rope"])
def test_nonfinite_padding_gives_the_parameters_the_gradients_that_zeros_give(http, rng, spec, kernel):
    config = {"d_model": 8, "num_heads": 2, "dtype": "float64", "spec": spec}
    name = post(http, "/v1/modules", name=f"padded-{'-'.join(spec)}-{kernel}", config=config, seed=0)["name"]
    query, key, value = (rng.normal(size=(BATCH, LENGTH, 8)) for _ in range(3))
    found = []
    for hidden in 0.0, np.nan:
        sent = {"key": np.where(REAL[..., None], key, hidden), "value": np.where(REAL[..., None], value, hidden)}
        body = {field: typed(x) for field, x in ({"query": query} | sent).items()} | {"key_mask": REAL.tolist()}
        wrt = ["query", "key", "value", "parameters"]
        found.append(post(http, f"/v1/modules/{name}/gradients", **body, kernel=kernel, wrt=wrt)["gradients"])
    assert found[0] == found[1]

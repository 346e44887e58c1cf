"""Queries and keys of different widths, raw: held against the formulas in float64 and PyTorch's autograd."""

import numpy as np
import pytest
import torch

from attention_client import Client, InvalidRequest, ShapeMismatch
from tests.api.talk import post

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, D, DK, DV, HIDDEN = 2, 4, 2, 5, 7, 3, 6, 4, 5
SHAPES = {
    "query": (BATCH, HEADS, QUERIES, D),
    "key": (BATCH, KV_HEADS, KEYS, DK),
    "value": (BATCH, KV_HEADS, KEYS, DV),
}
LEARNED = {
    "bilinear": {"score.weight": (HEADS, D, DK)},
    "additive": {
        "score.query_weight": (HEADS, HIDDEN, D),
        "score.key_weight": (HEADS, HIDDEN, DK),
        "score.v": (HEADS, HIDDEN),
    },
}
SCORES = {"bilinear": {"name": "bilinear"}, "additive": {"name": "additive", "hidden": HIDDEN}}
KERNELS = [
    ("bilinear", "fused"),
    ("bilinear", "blocked"),
    ("bilinear", None),
    ("additive", "blocked"),
    ("additive", None),
]


def drawn(rng, score):
    tensors = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    return tensors, {name: rng.normal(size=shape) for name, shape in LEARNED[score].items()}


def reference(tensors, learned, *, mask):
    """Output and weights by the definition of each score."""
    q, k, v = tensors["query"], *(tensors[name].repeat_interleave(HEADS // KV_HEADS, 1) for name in ("key", "value"))
    if "score.weight" in learned:
        scores = torch.einsum("bhqd,hde,bhke->bhqk", q, learned["score.weight"], k)
    else:
        a = torch.einsum("hnd,bhqd->bhqn", learned["score.query_weight"], q)
        c = torch.einsum("hne,bhke->bhkn", learned["score.key_weight"], k)
        scores = torch.einsum("hn,bhqkn->bhqk", learned["score.v"], torch.tanh(a[:, :, :, None] + c[:, :, None]))
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return weights @ v, weights


@pytest.mark.parametrize(("score", "kernel"), KERNELS)
def test_forward_weights_and_gradients(server, rng, score, kernel):
    tensors, learned = drawn(rng, score)
    upstream = rng.normal(size=(BATCH, HEADS, QUERIES, DV))
    spec = {"score": SCORES[score], "masks": [{"name": "causal"}]}
    mask = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril()
    leaves = {name: torch.tensor(x, requires_grad=True) for name, x in (tensors | learned).items()}
    output, weights = reference(leaves, leaves, mask=mask)
    expected = torch.autograd.grad(output, list(leaves.values()), torch.tensor(upstream))
    with Client(server) as client:
        q, k, v = tensors.values()
        asked = {"spec": spec, "parameters": learned}
        reply = client.attention.forward(q, k, v, kernel=kernel, return_=["output", "weights", "k"], **asked)
        np.testing.assert_allclose(reply.output, output.detach(), atol=1e-9)
        np.testing.assert_allclose(reply.weights, weights.detach(), atol=1e-9)
        np.testing.assert_allclose(reply.k, k)
        if kernel is None:
            looked = client.attention.weights(q, k, v, **asked)
            np.testing.assert_allclose(looked.weights, weights.detach(), atol=1e-9)
        found = client.attention.gradients(
            q, k, v, upstream=upstream, wrt=[*leaves], kernel=kernel, check=True, **asked
        )
    for name, gradient in zip(leaves, expected, strict=True):
        np.testing.assert_allclose(found.gradients[name], gradient, atol=1e-8, err_msg=name)
    assert all(row.passed for row in found.check.values())


@pytest.mark.parametrize("score", LEARNED)
def test_a_past_and_heads_side_by_side(server, rng, score):
    tensors, learned = drawn(rng, score)
    q, k, v = tensors.values()
    with Client(server) as client:
        asked = {"spec": {"score": SCORES[score]}, "parameters": learned}
        whole = client.attention.forward(q, k, v, **asked).output
        parts = client.attention.forward(
            q, k[:, :, 2:], v[:, :, 2:], past_key=k[:, :, :2], past_value=v[:, :, :2], **asked
        )
        np.testing.assert_allclose(parts.output, whole, atol=1e-12)
        np.testing.assert_array_equal(parts.present_key, k)
        merged = [x.transpose(0, 2, 1, 3).reshape(BATCH, x.shape[2], -1) for x in (q, k, v)]
        flat = client.attention.forward(*merged, num_heads=HEADS, num_kv_heads=KV_HEADS, **asked).output
        np.testing.assert_allclose(flat, whole.transpose(0, 2, 1, 3).reshape(BATCH, QUERIES, -1), atol=1e-12)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"score": {"name": "cosine"}},
        {"score": {"name": "bilinear"}, "position": {"name": "rope"}},
        {"score": {"name": "bilinear"}, "method": {"name": "performer"}},
    ],
)
def test_other_specs_take_one_width(server, rng, spec):
    with Client(server) as client:
        tensors, _ = drawn(rng, "bilinear")
        with pytest.raises(ShapeMismatch) as error:
            client.attention.forward(*tensors.values(), spec=spec)
        assert error.value.param == "key"
        with pytest.raises(InvalidRequest) as error:
            client.attention.complexity(8, num_heads=2, head_dim=4, key_dim=6, spec=spec)
        assert error.value.param == "key_dim"


def test_costs_count_both_widths(http):
    sizes = {"num_heads": 3, "head_dim": 4, "key_dim": 6, "value_dim": 5, "shape": {"queries": 7, "keys": 9}}
    bilinear = post(http, "/v1/attention/complexity", spec={"score": {"name": "bilinear"}}, **sizes)
    additive = post(http, "/v1/attention/complexity", spec={"score": {"name": "additive", "hidden": 8}}, **sizes)
    pairs = 3 * 7 * 9
    scores = [reply["costs"][0]["forward"]["dense"]["scores"] for reply in (bilinear, additive)]
    assert scores == [2 * pairs * 6 + 3 * 7 * 2 * 4 * 6, 2 * pairs * 8 + 3 * 2 * 8 * (7 * 4 + 9 * 6)]

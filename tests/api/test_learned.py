"""Learned tensors of a spec over HTTP: in modules, with raw requests, in gradients; dropout and second gradients."""

import numpy as np
import pytest

from attention_client import InvalidRequest, KernelUnsuitable, ShapeMismatch
from tests.api.talk import post

H, D = 2, 3


def test_what_the_spec_learns_must_come_and_nothing_else(client):
    q = np.ones((1, H, 2, D))
    spec = {"score": {"name": "bilinear"}}
    with pytest.raises(InvalidRequest, match=r"parameters\.score\.weight: the spec needs it, of shape \[2, 3, 3\]"):
        client.attention.forward(q, spec=spec)
    with pytest.raises(ShapeMismatch, match=r"parameters\.score\.weight: expected \[2, 3, 3\]"):
        client.attention.forward(q, spec=spec, parameters={"score.weight": np.ones((2, 3))})
    weight = {"score.weight": np.ones((2, 3, 3))}
    with pytest.raises(InvalidRequest, match=r"parameters\.sinks: this spec has score\.weight; leave it out"):
        client.attention.forward(q, spec=spec, parameters=weight | {"sinks": np.zeros(2)})
    with pytest.raises(InvalidRequest, match=r"this spec has no learned tensors; leave it out"):
        client.attention.forward(q, parameters=weight)
    with pytest.raises(InvalidRequest, match=r"score\.weight"):
        client.attention.gradients(q, spec=spec, parameters=weight, wrt=["score.v"])
    assert client.attention.forward(q, spec=spec, parameters=weight).output.shape == q.shape


def test_a_head_of_a_learned_tensor(client):
    config = {"d_model": 8, "num_heads": 4, "num_kv_heads": 2, "spec": {"score": {"name": "additive", "hidden": 5}}}
    config["spec"]["add_bias_kv"] = True
    client.modules.create("heads.additive", config, seed=0)
    whole = client.modules.parameter("heads.additive", "score.key_weight").value
    one = client.modules.parameter("heads.additive", "score.key_weight", head=3).value
    np.testing.assert_array_equal(one, whole[3:])
    assert client.modules.parameter("heads.additive", "bias_v", head=1).value.shape == (2,)
    with pytest.raises(InvalidRequest, match="expected 0 to 3"):
        client.modules.parameter("heads.additive", "score.v", head=4)


def test_dropout_is_reported_and_repeated(client, rng):
    q = rng.standard_normal((2, H, 5, D))
    request = {"dropout": {"p": 0.5, "seed": 4, "return_mask": True}, "select": {"heads": [1]}}
    reply = client.attention.forward(q, return_=["output", "weights"], **request)
    assert reply.dropout_mask.shape == reply.weights.shape == (2, 1, 5, 5)
    assert reply.ran.kernel != "fused"
    np.testing.assert_allclose(
        (reply.weights * reply.dropout_mask / 0.5) @ q[:, [1]], reply.output[:, [1]], rtol=0, atol=1e-12
    )
    again = client.attention.gradients(q, return_=["output"], wrt=["query", "weights"], check=True, **request)
    np.testing.assert_array_equal(again.dropout_mask, reply.dropout_mask)
    np.testing.assert_allclose(again.output, reply.output, rtol=0, atol=1e-12)
    assert all(check.passed for check in again.check.values())
    none = client.attention.forward(q, dropout={"p": 0})
    np.testing.assert_array_equal(none.output, client.attention.forward(q).output)
    assert none.dropout_mask is None
    with pytest.raises(KernelUnsuitable, match="dropout"):
        client.attention.forward(q, kernel="fused", dropout={"p": 0.5})
    with pytest.raises(InvalidRequest, match=r"dropout\.p"):
        client.attention.forward(q, dropout={"p": 1})


@pytest.mark.parametrize("target", ["query", "weights", "q_proj.weight"])
def test_a_hessian_product_is_symmetric(client, rng, target):
    """⟨H d, e⟩ = ⟨d, H e⟩, for an input, a tap and a parameter."""
    spec = {"score": {"name": "additive"}, "normalizer": {"name": "entmax15"}}
    config = {"d_model": 6, "num_heads": 2, "dtype": "float64", "spec": spec}
    made = client.modules.create(f"second.{target}", config, seed=1)
    x = rng.standard_normal((1, 3, 6))
    along = rng.standard_normal(x.shape)
    names = list(dict.fromkeys(["query", target]))
    reply = client.gradients(made.name, x, wrt=names, directions={"query": along})
    other = rng.standard_normal(reply.gradients[target].shape)
    back = client.gradients(made.name, x, wrt=names, directions={target: other})
    np.testing.assert_allclose(
        (reply.hessian_products[target] * other).sum(), (back.hessian_products["query"] * along).sum(), atol=1e-10
    )


def test_directions_must_fit(client, rng):
    q = rng.standard_normal((1, H, 2, D))
    with pytest.raises(InvalidRequest, match=r"directions\.key: wrt does not list it"):
        client.attention.gradients(q, wrt=["query"], directions={"key": q})
    with pytest.raises(ShapeMismatch, match=r"directions\.query: expected the shape of query, \[1, 2, 2, 3\]"):
        client.attention.gradients(q, wrt=["query"], directions={"query": q[0]})
    with pytest.raises(ShapeMismatch, match=r"directions\.weights: expected the shape of weights, \[1, 2, 2, 2\]"):
        client.attention.gradients(q, wrt=["weights"], directions={"weights": q})
    with pytest.raises(KernelUnsuitable, match="differentiated again"):
        client.attention.gradients(q, wrt=["query"], directions={"query": q}, kernel="fused")


def test_a_linear_function_has_no_second_gradient(http):
    reply = post(http, "/v1/attention/gradients", query=[[1.0]], wrt=["context"], directions={"context": [[2.0]]})
    assert np.count_nonzero(reply["hessian_products"]["context"]) == 0

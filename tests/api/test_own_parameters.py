"""Requests that bring parameters of their own to a module, and gradients of a loss of taps."""

import asyncio

import numpy as np
import pytest

from attention_client import AsyncClient
from attention_contract.errors import InvalidRequest, InvalidTensor, ShapeMismatch, VersionMismatch

CONFIG = {"d_model": 8, "num_heads": 2, "num_kv_heads": 1, "dtype": "float64", "spec": {"masks": [{"name": "causal"}]}}


@pytest.fixture(scope="module")
def client(client):
    client.modules.create("own", CONFIG, seed=1, durable=False)
    client.modules.create("own-half", CONFIG | {"dtype": "float16"}, seed=1, durable=False)
    return client


def parameters(client, rng, name="own"):
    return {each.name: rng.normal(size=each.shape) for each in client.modules.parameters(name).parameters}


@pytest.fixture
def tokens(rng):
    return rng.normal(size=(2, 5, 8))


def test_all_or_some_take_the_place_of_the_modules_own(client, rng, tokens):
    given = parameters(client, rng)
    some = {name: given[name] for name in ("k_proj.weight", "o_proj.bias")}
    own = {name: client.modules.parameter("own", name).value for name in given}
    before = client.forward("own", tokens)
    for sent in (given, some):
        client.modules.create("like", CONFIG, parameters=own | sent, durable=False)
        reply = client.forward("own", tokens, parameters=sent, return_=["output", "weights"])
        expected = client.forward("like", tokens, return_=["output", "weights"])
        np.testing.assert_allclose(reply.output, expected.output, atol=1e-13)
        np.testing.assert_allclose(reply.weights, expected.weights, atol=1e-13)
        looked = client.weights("own", tokens, parameters=sent)
        np.testing.assert_allclose(looked.weights, expected.weights, atol=1e-13)
        found = client.gradients("own", tokens, parameters=sent, wrt=["query", "parameters"])
        like = client.gradients("like", tokens, wrt=["query", "parameters"])
        for name, gradient in like.gradients.items():
            np.testing.assert_allclose(found.gradients[name], gradient, atol=1e-12, err_msg=name)
        assert (reply.ran.version, looked.ran.version, found.ran.version) == (None, None, None)
        client.modules.delete("like")
    after = client.forward("own", tokens)
    np.testing.assert_array_equal(after.output, before.output)
    assert after.ran.version == before.ran.version == client.modules.get("own").version


def test_a_check_by_central_differences_uses_them_too(client, rng, tokens):
    wrt = ["query", "q_proj.weight"]
    found = client.gradients("own", tokens, parameters=parameters(client, rng), wrt=wrt, check=True)
    assert found.check is not None
    assert all(each.passed for each in found.check.values())


def test_they_are_converted_to_the_modules_dtype(client, rng, tokens):
    given = parameters(client, rng, "own-half")
    halves = {name: value.astype(np.float16) for name, value in given.items()}
    wide = client.forward("own-half", tokens, parameters=given)
    np.testing.assert_array_equal(wide.output, client.forward("own-half", tokens, parameters=halves).output)
    with pytest.raises(InvalidTensor) as fault:
        client.forward("own-half", tokens, parameters={"q_proj.bias": np.full(8, 1e6)})
    assert fault.value.param == "parameters.q_proj.bias"


@pytest.mark.parametrize(
    ("given", "kind", "param"),
    [
        ({"w": np.ones(3)}, InvalidRequest, "parameters.w"),
        ({"q_proj.weight": np.ones((8, 4))}, ShapeMismatch, "parameters.q_proj.weight"),
        ({"q_proj.bias": np.ones(8, np.int64)}, InvalidTensor, "parameters.q_proj.bias"),
    ],
)
def test_what_the_module_has_no_place_for_is_refused(client, tokens, given, kind, param):
    with pytest.raises(kind) as fault:
        client.forward("own", tokens, parameters=given)
    assert fault.value.param == param


def test_a_pin_is_that_of_the_module(client, rng, tokens):
    given = parameters(client, rng)
    client.forward("own", tokens, parameters=given, version=client.modules.get("own").version)
    with pytest.raises(VersionMismatch):
        client.forward("own", tokens, parameters=given, version="other")


@pytest.mark.parametrize("media_type", ["safetensors", "json"])
async def test_requests_alike_that_come_together_keep_their_own_parameters(client, server, rng, tokens, media_type):
    sent = [None, *(parameters(client, rng) for _ in range(3))]
    alone = [client.forward("own", tokens, parameters=each).output for each in sent]

    async with AsyncClient(server, media_type=media_type) as clients:
        replies = await asyncio.gather(*(clients.forward("own", tokens, parameters=each) for each in sent * 8))
    for index, reply in enumerate(replies):
        np.testing.assert_allclose(reply.output, alone[index % len(sent)], atol=1e-12)


# ── a loss of taps ───────────────────────────────────────────────────────────────────────────────────────────────────


def moved(client, tokens, along, step):
    return client.forward("own", tokens + step * along, return_=["output", "weights", "k"])


def test_a_loss_may_depend_on_taps_beside_the_output(client, rng, tokens):
    """Against central differences of Σ output · upstream + Σ weights · tap_upstream + Σ k · tap_upstream."""
    reply, along, step = (
        client.forward("own", tokens, return_=["output", "weights", "k"]),
        rng.normal(size=(2, 5, 8)),
        1e-5,
    )
    upstream, of_k = rng.normal(size=reply.output.shape), rng.normal(size=reply.k.shape)
    of_weights = rng.normal(size=(2, 1, 5, 5))
    found = client.gradients(
        "own", tokens, upstream=upstream, tap_upstream={"weights": of_weights, "k": of_k}, wrt=["query"]
    )

    def loss(step):
        at = moved(client, tokens, along, step)
        return (at.output * upstream).sum() + (at.weights * of_weights).sum() + (at.k * of_k).sum()

    numeric = (loss(step) - loss(-step)) / (2 * step)
    assert (found.gradients["query"] * along).sum() == pytest.approx(numeric, rel=1e-7)


def test_second_gradients_reach_the_upstream_gradients(client, rng, tokens):
    """∂/∂upstream of ⟨∂L/∂query, d⟩ is the derivative of the output along d, and of a tap along d for its upstream."""
    reply, along, step = client.forward("own", tokens, return_=["output", "weights"]), rng.normal(size=(2, 5, 8)), 1e-5
    found = client.gradients(
        "own", tokens, wrt=["query", "upstream", "tap_upstream.weights"], directions={"query": along},
        upstream=np.ones_like(reply.output), tap_upstream={"weights": np.ones((1, 1, 1, 1))},
    )  # fmt: skip
    ahead, behind = moved(client, tokens, along, step), moved(client, tokens, along, -step)
    for name, tap in (("upstream", "output"), ("tap_upstream.weights", "weights")):
        numeric = (getattr(ahead, tap) - getattr(behind, tap)) / (2 * step)
        np.testing.assert_allclose(found.hessian_products[name], numeric, atol=1e-8)
        np.testing.assert_allclose(found.gradients[name], getattr(reply, tap), atol=1e-13)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tap_upstream": {"output": np.ones(1)}}, "tap_upstream.output"),
        ({"tap_upstream": {"weights": np.ones((3, 5))}}, "tap_upstream.weights"),
        ({"tap_upstream": {"weights": np.ones((5, 5))}, "check": True}, "check"),
        ({"wrt": ["tap_upstream.weights"]}, "wrt.0"),
    ],
)
def test_an_upstream_that_has_no_place_is_refused(client, tokens, fields, param):
    with pytest.raises(InvalidRequest) as fault:
        client.gradients("own", tokens, **fields)
    assert fault.value.param == param

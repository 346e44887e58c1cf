"""Implicit weights of linear attention over HTTP: M with M·V = output, its statistics, edits and gradients."""

import numpy as np
import pytest

from attention_client import Client
from attention_contract.errors import AttentionError, InvalidRequest

CAUSAL = [{"name": "causal"}]
RULES = {
    "sum": {"rule": "sum"},
    "sum, identity": {"rule": "sum", "features": "identity"},
    "gated": {"rule": "gated"},
    "delta": {"rule": "delta"},
    "gated_delta": {"rule": "gated_delta"},
}
SIZES = {"gate": (0.9, 1.0), "beta": (0.1, 0.9)}
READS = {"gated": ("gate",), "delta": ("beta",), "gated_delta": ("gate", "beta")}


@pytest.fixture
def fields(rng):
    """A raw request in float64 of more tokens than a chunk has, with grouped heads."""

    def made(name, length=150):
        found = {
            each: rng.normal(size=(2, heads, length, 4)) for each, heads in (("query", 4), ("key", 2), ("value", 2))
        }
        rates = {each: rng.uniform(*SIZES[each], size=(2, 2, length)) for each in READS.get(name, ())}
        return found | rates | {"spec": {"masks": CAUSAL, "method": {"name": "linear"} | RULES[name]}}

    return made


def by_steps(query, key, value, gate=None, beta=None):
    """The (gated) delta rule token by token: S = γ·S + k (β (v − γ·Sᵀk))ᵀ, o = Sᵀq."""
    key, query = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (key, query))
    output = np.zeros((*query.shape[:3], value.shape[3]))
    for batch, head in np.ndindex(*query.shape[:2]):
        of = head // 2
        state = np.zeros((key.shape[3], value.shape[3]))
        for token in range(query.shape[2]):
            state = state * (1.0 if gate is None else gate[batch, of, token])
            k = key[batch, of, token]
            state += np.outer(k, beta[batch, of, token] * (value[batch, of, token] - state.T @ k))
            output[batch, head, token] = state.T @ query[batch, head, token]
    return output


@pytest.mark.sampled(name=3)
@pytest.mark.parametrize("name", RULES)
def test_the_weights_times_the_values_are_the_output(client: Client, fields, name):
    sent = fields(name)
    reply = client.attention.weights(**sent)
    output = client.attention.forward(**sent).output
    values = np.repeat(sent["value"], 2, axis=1)
    assert reply.implicit is True
    assert not np.triu(reply.weights, 1).any()
    np.testing.assert_allclose(reply.weights @ values, output, atol=1e-12, rtol=0)
    if name in {"delta", "gated_delta"}:
        expected = by_steps(**{each: x for each, x in sent.items() if each != "spec"})
        np.testing.assert_allclose(reply.weights @ values, expected, atol=1e-12, rtol=0)


def test_a_tap_changes_no_output_and_a_module_has_the_same_weights(client: Client, rng):
    spec = {"masks": CAUSAL, "method": {"name": "linear", "rule": "gated_delta"}}
    client.modules.create("implicit", {"d_model": 8, "num_heads": 2, "dtype": "float64", "spec": spec}, seed=0)
    x = rng.normal(size=(2, 7, 8))
    plain = client.forward("implicit", x).output
    found = client.forward("implicit", x, return_=["output", "weights", "v", "context"])
    # Some processors sum a product in another order where its rows lie apart in memory.
    np.testing.assert_allclose(found.output, plain, rtol=0, atol=1e-15)
    np.testing.assert_allclose(found.weights @ found.v, found.context, atol=1e-14)
    np.testing.assert_array_equal(client.weights("implicit", x).weights, found.weights)


def test_statistics_that_need_a_distribution_are_refused_by_name(client: Client, fields):
    sent = fields("gated_delta", 12)
    with pytest.raises(InvalidRequest, match="entropy needs a distribution") as refused:
        client.attention.weights(**sent, statistics=["max_weight", "entropy"])
    assert refused.value.param == "statistics.1"
    plain = client.attention.weights(**sent)
    assert {name for name, value in plain.statistics if value is not None} == {"max_weight"}
    np.testing.assert_allclose(plain.statistics.max_weight, plain.weights.max(-1).mean(-1), rtol=1e-6)


def test_statistics_of_absolute_shares(client: Client, fields):
    sent = fields("gated_delta", 12)
    names = ["entropy", "max_weight", "first_key", "own_position"]
    reply = client.attention.weights(**sent, statistics=names, normalize="absolute")
    shares = abs(reply.weights) / abs(reply.weights).sum(-1, keepdims=True)
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1))).sum(-1)
    expected = {
        "entropy": entropy.mean(-1), "max_weight": shares.max(-1).mean(-1),
        "first_key": shares[..., 0].mean(-1), "own_position": np.diagonal(shares, 0, 2, 3).mean(-1),
    }  # fmt: skip
    for each, values in expected.items():
        np.testing.assert_allclose(getattr(reply.statistics, each), values, atol=1e-10)


def test_top_keys_and_pools_are_those_of_the_largest_magnitude(client: Client, fields):
    reply = client.attention.weights(**fields("gated_delta", 12), top_k=3, pool=4)
    order = np.argsort(-abs(reply.weights), -1)[..., :3]
    largest = np.take_along_axis(reply.weights, order, -1)
    np.testing.assert_array_equal(reply.top.weights, largest)
    np.testing.assert_array_equal(reply.top.keys, np.where(largest == 0, -1, order))
    squares = reply.weights.reshape(2, 4, 3, 4, 3, 4).transpose(0, 1, 2, 4, 3, 5).reshape(2, 4, 3, 3, 16)
    place = abs(squares).argmax(-1)[..., None]
    np.testing.assert_array_equal(reply.pooled, np.take_along_axis(squares, place, -1)[..., 0])


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("edit", [{"set": 0.0}, {"scale": 2.0}])
def test_edited_weights_act_on_the_values(client: Client, fields, rng, edit, state):
    sent = fields("gated_delta", 12)
    before = {"initial_state": rng.normal(size=(2, 2, 4, 4))} if state else {}
    changed = {"tap": "weights", "heads": [1], "queries": [5, 7], "keys": [2, 5], **edit}
    found = client.attention.forward(**sent, **before, edits=[changed], return_=["output", "weights"])
    plain = client.attention.forward(**sent, **before, return_=["output", "weights"])
    moved = found.weights - plain.weights
    here = np.ix_([0, 1], [1], [5, 7], [2, 5])
    expected = edit["set"] if "set" in edit else 2 * plain.weights[here]
    np.testing.assert_allclose(found.weights[here], np.broadcast_to(expected, (2, 1, 2, 2)))
    np.testing.assert_allclose(found.output, plain.output + moved @ np.repeat(sent["value"], 2, 1), atol=1e-12)
    compared = client.attention.weights(**sent, edits=[changed], compare="unedited")
    np.testing.assert_allclose(compared.differences.weights, moved, atol=1e-14)


@pytest.mark.sampled(name=2)
@pytest.mark.parametrize("name", RULES)
def test_gradients_of_the_weights_are_exact(client: Client, fields, rng, name):
    sent, upstream = fields(name, 9), rng.normal(size=(2, 4, 9, 4))
    reply = client.attention.gradients(**sent, wrt=["weights", "query", "value"], upstream=upstream, check=True)
    expected = upstream @ np.repeat(sent["value"], 2, 1).swapaxes(2, 3)
    np.testing.assert_allclose(reply.gradients["weights"], expected, atol=1e-12)
    assert all(each.passed for each in reply.check.values())


def test_a_matrix_larger_than_the_memory_is_refused_before_it_is_made(client: Client):
    query = np.zeros((1, 2**18, 1), np.float32)
    spec = {"masks": CAUSAL, "method": {"name": "linear"}}
    with pytest.raises(AttentionError, match="the request needs an estimated") as refused:
        client.attention.weights(query, num_heads=1, spec=spec)
    assert refused.value.status in {413, 507}


def test_attribution_refuses_implicit_weights(client: Client, fields):
    with pytest.raises(InvalidRequest, match=r"spec\.method"):
        client.attention.attribution(**fields("gated_delta", 6))


def test_pictures_of_implicit_weights_diverge(client: Client, fields):
    drawn = client.attention.weights(**fields("gated_delta", 6)).plot()
    assert "implicit weights" in drawn.data.decode()

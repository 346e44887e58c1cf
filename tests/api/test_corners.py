"""Requests at the edges of what can be said: an answer that holds, or a refusal, and never an error of the server."""

import numpy as np
import pytest

from attention_client import AttentionError

Q = np.array([[1.0, 0.5], [0.2, -1.0]])
CAUSAL = [{"name": "causal"}]


@pytest.mark.parametrize("score", ["cosine", "bilinear"])
def test_a_linformer_of_half_type_under_a_score_of_its_own(client, score):
    spec = {"score": {"name": score}, "method": {"name": "linformer", "rank": 2, "length": 8}}
    config = {"d_model": 4, "num_heads": 2, "dtype": "float16", "spec": spec}
    client.modules.create(f"corner.{score}", config, seed=0)
    assert np.isfinite(client.forward(f"corner.{score}", [[1, 2, 3, 4]]).output).all()


@pytest.mark.parametrize("method", ["linear", "performer"])
def test_gradients_where_no_query_sees_a_key_are_zero(client, method):
    spec = {"method": {"name": method}, "masks": CAUSAL}
    request = {"spec": spec, "offsets": -9, "wrt": ["query", "q"]}
    for more in ({"check": True}, {"directions": {"query": Q}}):
        reply = client.attention.gradients(Q, **request, **more)
        assert not any(gradient.any() for gradient in reply.gradients.values())


def test_a_gate_too_small_for_its_dtype_forgets(client):
    spec = {"method": {"name": "linear", "rule": "gated"}, "masks": CAUSAL}
    output = client.attention.forward(Q.tolist(), spec=spec, gate=[1e-300, 0.5]).output
    assert np.isfinite(output).all()


def test_a_learned_bandwidth_of_zero_looks_at_the_nearest(client):
    spec = {"score": {"name": "gaussian", "sigma": "learned"}}
    reply = client.attention.forward(
        [[0.1]], [[0.0], [1.0]], [[3.0], [5.0]], spec=spec, parameters={"score.sigma": [0.0]}
    )
    np.testing.assert_allclose(reply.output, [[3.0]])


def test_a_gradient_has_the_shape_of_what_was_sent(client):
    past = Q[None]  # [Hkv, P, D] beside [L, D]
    found = client.attention.gradients(Q, past_key=past, past_value=past, wrt=["past_key", "past_value", "query"])
    assert {name: gradient.shape for name, gradient in found.gradients.items()} == {
        "past_key": (1, 2, 2), "past_value": (1, 2, 2), "query": (2, 2)
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_check_runs_in_float64_throughout(client, dtype):
    reply = client.attention.gradients(Q, spec={"normalizer": {"dtype": dtype}}, check=True, wrt=["scores", "query"])
    assert all(check.passed for check in reply.check.values())


def test_no_keys_and_no_sequences(client):
    spec = {"method": {"name": "performer"}}
    empty = np.zeros((1, 2, 0, 4))
    reply = client.attention.forward(np.ones((1, 2, 3, 4)), empty, empty, spec=spec, report_error=True)
    assert not reply.output.any()
    none = client.attention.forward(
        np.zeros((0, 2, 3, 4)), np.zeros((0, 2, 5, 4)), spec={"method": {"name": "nystrom"}}
    )
    assert none.output.shape == (0, 2, 3, 4)


def test_second_gradients_of_a_cosine_at_zero_are_finite(client):
    for query in (np.zeros((2, 2)), Q * 1e-200):
        reply = client.attention.gradients(query, spec={"score": {"name": "cosine"}}, directions={"query": Q})
        assert np.isfinite(reply.hessian_products["query"]).all()


def test_a_sink_of_minus_infinity_takes_nothing(client):
    spec = {"normalizer": {"sinks": True, "temperature": 0.5}}
    hidden = np.array([[True, True], [False, False]])
    for kernel in ("blocked", "materialized"):
        reply = client.attention.forward(Q, spec=spec, parameters={"sinks": [-np.inf]}, mask=hidden, kernel=kernel)
        plain = client.attention.forward(Q, spec={"normalizer": {"temperature": 0.5}}, mask=hidden)
        np.testing.assert_allclose(reply.output, plain.output, rtol=0, atol=1e-12)


@pytest.mark.parametrize("position", ["none", "rope", "alibi"])
def test_selected_heads_and_queries_may_repeat(client, position):
    one_head = [[[1.0, 2.0], [3.0, 1.0], [0.0, 1.0]]]
    heads, queries = [0, 0, 0], [2, 0, 2, 1, 0]
    spec = {"position": {"name": position}}
    reply = client.attention.weights(one_head, spec=spec, select={"heads": heads, "queries": queries}, top_k=1)
    whole = client.attention.weights(one_head, spec=spec).weights
    np.testing.assert_allclose(reply.weights, whole[heads][:, queries], rtol=1e-6)
    assert reply.top.keys.shape == (3, 5, 1)


@pytest.mark.parametrize("operation", ["forward", "weights", "gradients"])
@pytest.mark.parametrize("offset", [2**63 - 1, 2**62, -(2**63)])
def test_an_offset_may_be_any_integer(client, operation, offset):
    """A query before all keys sees none of them and one behind them sees all, however far it stands."""
    query = np.stack([Q, Q])[:, None]
    spec = {"masks": CAUSAL, "position": {"name": "none"}}
    near = 9 if offset > 0 else -9
    far, expected = (
        getattr(client.attention, operation)(query, spec=spec, offsets=[first, 0]) for first in (offset, near)
    )
    match operation:
        case "forward":
            np.testing.assert_array_equal(far.output, expected.output)
        case "weights":
            np.testing.assert_array_equal(far.statistics.entropy, expected.statistics.entropy)
        case "gradients":
            np.testing.assert_array_equal(far.gradients["query"], expected.gradients["query"])


def test_a_mask_holds_no_number_too_large_for_the_module(client):
    """One far below zero hides its key all the same."""
    client.modules.create("corner.mask", {"d_model": 2, "num_heads": 1, "dtype": "float16"}, seed=0)
    for kernel in ("fused", "blocked", "materialized"):
        with pytest.raises(AttentionError, match="mask: a number is too large for float16") as refused:
            client.forward("corner.mask", Q, mask=np.array([[0, 0], [0, 1e30]]), kernel=kernel)
        assert (refused.value.status, refused.value.param) == (422, "mask")
        reply = client.forward(
            "corner.mask", Q, mask=np.array([[0, 0], [0, -1e30]]), kernel=kernel, return_=["weights"]
        )
        assert reply.weights[0, 1].tolist() == [1, 0]


@pytest.mark.parametrize("tap", ["context", "scores", "v"])
def test_effects_where_there_are_no_queries_are_zero(client, tap):
    none = np.zeros((2, 1, 0, 4))
    keys = np.ones((2, 1, 3, 4))
    reply = client.attention.effects(none, keys, keys, sweep={"tap": tap, "set": 0.0})
    assert reply.effects.max.shape == (2, 1)
    assert not reply.effects.norm.any()
    assert not reply.effects.max.any()


@pytest.mark.parametrize("operation", ["forward", "weights", "gradients"])
def test_ran_tells_the_processors_share_of_the_time(client, operation):
    ran = getattr(client.attention, operation)(np.ones((1, 2, 64, 16))).ran
    assert 0 < ran.cpu_ms <= 1.05 * ran.compute_ms + 0.05  # two clocks

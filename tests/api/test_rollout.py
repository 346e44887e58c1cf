"""Rollout and flow over HTTP, of sent and of recorded weights."""

import numpy as np
import pytest

from attention_client import InvalidRequest, RecordingNotFound
from tests.api.talk import post, refuse

TEXT = {"model": "by hand", "text": "a b c", "created": "2026-01-01T00:00:00Z"}
PATH = "/v1/attention/rollout"


@pytest.fixture
def recorded(rng):
    """A recording of three layers in a stack of three tokens, in a model with cross-attention."""
    made = rng.dirichlet(np.ones(3), (3, 2, 3)).astype(np.float32)
    names = [f"decoder.{layer}" for layer in range(3)]
    attentions = [{"name": name, "heads": ["A", "B"]} for name in (*names, "decoder.1.cross")]
    tensors = {f"{layer}.weights": made[layer] for layer in range(3)}
    tensors["1.cross.weights"] = rng.dirichlet(np.ones(2), (2, 3)).astype(np.float32)
    tokens = {"decoder": ["a", "b", "c"], "encoder": ["x", "y"]}
    return made, TEXT | {"tokens": tokens, "attentions": attentions, "decoder": tensors}


def test_recorded_and_sent_weights_give_the_same(client, recorded):
    made, file = recorded
    stored = client.recordings.create(file)
    for method in ("rollout", "flow"):
        found = client.recordings.rollout(stored.id, method=method)
        sent = client.attention.rollout(made, method=method)
        np.testing.assert_allclose(found.values, sent.values, atol=1e-12)
        assert (found.layers, found.tokens) == ([f"decoder.{layer}" for layer in range(3)], ["a", "b", "c"])
        assert found.ran.kernel == {"rollout": "products", "flow": "dinic"}[method]
    some = client.recordings.rollout(stored.id, layers=["decoder.2", "decoder.0"], queries=[2], residual=0.25)
    m = [0.25 * np.eye(3) + 0.75 * made[layer].mean(0) for layer in (2, 0)]
    np.testing.assert_allclose(some.values, (m[0] @ m[1])[[2]], atol=1e-6)
    assert some.layers == ["decoder.0", "decoder.2"]
    with pytest.raises(InvalidRequest, match=r"decoder\.1\.cross"):
        client.recordings.rollout(stored.id, layers=["decoder.1.cross"])
    with pytest.raises(InvalidRequest, match="out of range"):
        client.recordings.rollout(stored.id, queries=[3])
    client.recordings.delete(stored.id)
    with pytest.raises(RecordingNotFound):
        client.recordings.rollout(stored.id)


def test_the_relevance_of_an_attribution_accumulates_over_layers(client, rng):
    x, upstream = rng.normal(size=(2, 1, 4, 8))
    client.modules.create("rolled", {"d_model": 8, "num_heads": 2, "dtype": "float64"}, seed=3)
    names = ["relevance", "gradient_attention"]
    shares = client.attribution("rolled", x, methods=names, upstream=upstream)
    client.modules.delete("rolled")
    found = [client.attention.rollout(getattr(shares, name)[[0, 0]], method="relevance") for name in names]
    fewer = client.attention.rollout(np.abs(shares.relevance), discard=0.5, residual=0)
    once = np.eye(4) + shares.relevance[0]
    for each in found:
        np.testing.assert_allclose(each.values, once @ once, rtol=1e-9)
    assert ((fewer.values > 0).sum(-1) <= 2).all()


def test_bad_weights_name_their_field(http):
    assert refuse(http, PATH, weights=[[[1.0]]], discard=1)["param"] == "discard"
    assert refuse(http, PATH, weights=[[["NaN"]]], method="relevance")["param"] == "weights"
    assert refuse(http, PATH, weights=[[[1.0, 0.0]]])["param"] == "weights"
    assert refuse(http, PATH, weights=[[[-1.0]]])["param"] == "weights"
    assert refuse(http, PATH, weights=[[[1.0]]], residual=1.5)["param"] == "residual"
    assert refuse(http, PATH, weights=[[[1.0]]], queries=[1])["param"] == "queries"
    assert refuse(http, PATH, weights=[[[1.0]]], labels=["a", "b"])["param"] == "labels"
    assert post(http, PATH, weights=[[[1.0]]], method="flow")["values"] == [[1.0]]


def test_a_rollout_names_the_layers_that_it_cannot_go_through(client, recorded):
    file = recorded[1]
    why = "linear_attention has no weights of pairs of tokens"
    stored = client.recordings.create(file | {"unseen": {"decoder.3": why, "encoder.0": why}})
    assert client.recordings.get(stored.id).unseen == {"decoder.3": why, "encoder.0": why}
    assert client.recordings.rollout(stored.id).unseen == {"decoder.3": why}
    with pytest.raises(InvalidRequest, match=f"no rollout goes through decoder.3: {why}"):
        client.recordings.rollout(stored.id, layers=["decoder.0", "decoder.3"])
    decoder = {name: x for name, x in file["decoder"].items() if "cross" in name}
    bare = client.recordings.create(file | {"unseen": {"decoder.0": why}, "decoder": decoder})
    with pytest.raises(InvalidRequest, match=f"no rollout goes through decoder.0: {why}"):
        client.recordings.rollout(bare.id)
    for each in (stored, bare):
        client.recordings.delete(each.id)

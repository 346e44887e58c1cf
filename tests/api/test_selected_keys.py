"""``select.keys``: the weights of chosen keys are those columns of all weights."""

import numpy as np
import pytest

from attention_client import InvalidRequest

RNG = np.random.default_rng(11)
X = RNG.normal(size=(2, 3, 6, 4))
KEYS = [4, 0, 5]
CAUSAL = {"masks": [{"name": "causal"}]}


def test_columns_of_all_weights_come_in_the_order_given(client):
    select = {"heads": [2, 0], "queries": [5, 1], "keys": KEYS}
    asked = {"spec": CAUSAL, "edits": [{"tap": "scores", "keys": [0], "set": 1.0}], "compare": "unedited"}
    whole = client.attention.weights(X, **asked)
    part = client.attention.weights(X, **asked, select=select)
    rows = np.ix_([0, 1], [2, 0], [5, 1], KEYS)
    np.testing.assert_allclose(part.weights, whole.weights[rows], atol=1e-6)
    np.testing.assert_allclose(part.differences.weights, whole.differences.weights[rows], atol=1e-6)
    np.testing.assert_allclose(part.statistics.entropy, whole.statistics.entropy, atol=1e-6)
    averaged = client.attention.weights(X, spec=CAUSAL, select={"keys": KEYS}, average_heads=True)
    mean = client.attention.weights(X, spec=CAUSAL).weights.mean(1)
    np.testing.assert_allclose(averaged.weights, mean[..., KEYS], atol=1e-6)


def test_top_keys_are_among_the_chosen_and_named_by_their_index_among_all(client):
    reply = client.attention.weights(X, spec=CAUSAL, select={"keys": KEYS}, top_k=5)
    assert reply.top.keys.shape == (2, 3, 6, 3)
    whole = client.attention.weights(X, spec=CAUSAL).weights
    for at in np.ndindex(2, 3, 6):
        seen = [key for key in KEYS if whole[at][key] > 0]
        expected = sorted(seen, key=lambda key: -whole[at][key])
        assert [key for key in reply.top.keys[at].tolist() if key >= 0] == expected
        np.testing.assert_allclose(reply.top.weights[at][: len(expected)], whole[at][expected], atol=1e-6)


def test_a_module_and_a_session_answer_for_chosen_keys(client):
    client.modules.create("chosen-keys", {"d_model": 8, "num_heads": 2, "spec": CAUSAL}, seed=1)
    x = RNG.normal(size=(1, 5, 8))
    whole = client.weights("chosen-keys", x).weights
    np.testing.assert_allclose(
        client.weights("chosen-keys", x, select={"keys": [3]}).weights, whole[..., [3]], atol=1e-6
    )
    with client.sessions.open("chosen-keys") as session:
        session.step(x[:, :3])
        late = session.weights(x[:, 3:], select={"keys": [4, 1]}).weights
    np.testing.assert_allclose(late, whole[:, :, 3:, [4, 1]], atol=1e-6)


def test_chosen_keys_are_refused_where_they_have_no_effect_or_do_not_exist(client):
    for fields, param in (
        ({"select": {"keys": [6]}}, "select.keys"),
        ({"select": {"keys": [0]}, "pool": 2}, "pool"),
        ({"select": {"keys": [0]}, "return_weights": False}, "select"),
        ({"select": {"keys": []}}, "select.keys"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            client.attention.weights(X, **fields)
        assert refused.value.param == param
    with pytest.raises(InvalidRequest) as refused:
        client.attention.forward(X, return_=["weights"], select={"keys": [0]})
    assert refused.value.param == "select.keys"


def test_a_picture_has_the_chosen_keys_alone(client):
    words = ["a", "b", "c", "d", "e", "f"]
    drawn = client.plot("svg").of(client.attention.weights, X, select={"keys": [4, 0]}, labels=words).data
    assert all(f">{word}</text>".encode() in drawn for word in "ae")
    assert b"6 queries \xc3\x97 2 keys" in drawn
    numbered = client.plot("svg", token_positions="all").of(
        client.attention.weights, X, select={"keys": [4]}, labels=words
    )
    assert ">e·4</text>".encode() in numbered.data

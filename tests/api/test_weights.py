"""What a head looks at, over HTTP: statistics against plain numpy, over real queries only."""

import numpy as np
import pytest

from tests.api.talk import post, refuse


def statistics(weights, positions, real):
    """The statistics by their definition; weights [H, Q, K]."""
    w = weights[:, real]
    distance = np.abs(positions[real][:, None] - np.arange(weights.shape[-1]))
    logs = np.log(np.where(w > 0, w, 1))
    return {
        "entropy": -(w * logs).sum(-1).mean(-1),
        "max_weight": w.max(-1).mean(-1),
        "mean_distance": (w * distance).sum(-1).mean(-1),
        "first_key": w[..., 0].mean(-1),
        "own_position": (w * (distance == 0)).sum(-1).mean(-1),
    }


def test_the_largest_weights_of_each_query(http, rng):
    x = rng.normal(size=(2, 3, 6, 4)).tolist()
    reply = post(http, "/v1/attention/weights", query=x, key_lengths=[6, 4], top_k=2)
    assert reply["queries"] == [6, 4]
    weights = np.array(reply["weights"])
    order = np.argsort(-weights, axis=-1)[..., :2]
    assert reply["top"]["keys"] == order.tolist()
    np.testing.assert_allclose(reply["top"]["weights"], np.take_along_axis(weights, order, -1), atol=1e-7)


def test_padding_is_given_or_seen(http, rng):
    x = rng.normal(size=(5, 8)).tolist()
    post(http, "/v1/modules", name="looks", config={"d_model": 8, "num_heads": 2})
    seen = post(http, "/v1/modules/looks/weights", query=x, key_mask=[1, 1, 1, 0, 0])
    given = post(http, "/v1/modules/looks/weights", query=x, key_mask=[1, 1, 1, 0, 0], query_mask=[1, 0, 0, 0, 0])
    assert (seen["queries"], given["queries"]) == (3, 1)
    np.testing.assert_allclose(given["statistics"]["entropy"], statistics(
        np.array(given["weights"]), np.arange(5), np.array([0]))["entropy"], atol=1e-5)  # fmt: skip
    assert np.shape(seen["statistics"]["entropy"]) == (2,)


def test_a_query_without_a_key_is_not_counted(http, rng):
    x = rng.normal(size=(1, 3, 4)).tolist()
    reply = post(http, "/v1/attention/weights", query=x, mask=[[False] * 3, [True] * 3, [True] * 3])
    assert reply["queries"] == 2
    none = post(http, "/v1/attention/weights", query=x, mask=[[False] * 3] * 3)
    assert (none["queries"], none["statistics"]["entropy"]) == (0, ["NaN"])


def test_selected_heads_and_rows_only(http, rng):
    x = rng.normal(size=(4, 7, 8)).tolist()
    whole = post(http, "/v1/attention/weights", query=x)
    part = post(http, "/v1/attention/weights", query=x, select={"heads": [2], "queries": [6, 0]}, top_k=100)
    np.testing.assert_allclose(part["weights"], np.array(whole["weights"])[[2]][:, [6, 0]], atol=1e-6)
    assert np.shape(part["top"]["keys"]) == (1, 2, 7)
    assert part["statistics"].keys() == whole["statistics"].keys()
    for name, values in part["statistics"].items():
        assert values == pytest.approx(whole["statistics"][name], rel=1e-6), name
    bare = post(http, "/v1/attention/weights", query=x, return_weights=False)
    assert "weights" not in bare
    averaged = post(http, "/v1/attention/weights", query=x, average_heads=True)
    np.testing.assert_allclose(averaged["weights"], np.mean(whole["weights"], 0), atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param"),
    [({"top_k": -1}, "top_k"), ({"query_mask": [True]}, "query_mask"), ({"select": {"heads": [9]}}, "select.heads")],
)
def test_what_cannot_be_is_refused(http, body, param):
    assert refuse(http, "/v1/attention/weights", query=[[1.0, 0], [0, 1]], **body)["param"] == param


@pytest.mark.slow
def test_long_sequences_are_looked_at_in_blocks(http, rng):
    n = 3000  # nine million weights a head, more than are held at once
    x = rng.normal(size=(n, 4)).round(3)
    body = {"query": x.tolist(), "spec": {"masks": [{"name": "causal"}]}, "top_k": 2}
    reply = post(http, "/v1/attention/weights", **body, return_weights=False)
    assert reply["ran"]["peak_bytes"] < 4 * n * n * 4
    scores = x @ x.T / 2
    weights = np.exp(scores) * np.tri(n)
    weights /= weights.sum(-1, keepdims=True)
    expected = statistics(weights[None], np.arange(n), np.arange(n))
    for name, value in expected.items():
        np.testing.assert_allclose(reply["statistics"][name], value[0], rtol=1e-4, err_msg=name)
    assert reply["top"]["keys"][0] == [0, -1]  # there is no second key that the first query could look at
    assert reply["top"]["keys"][-1] == np.argsort(-weights[-1])[:2].tolist()


def test_a_kernel_that_keeps_no_weights_cannot_show_them(http):
    assert refuse(http, "/v1/attention/weights", query=[[1.0, 0]], kernel="fused")["code"] == "kernel_unsuitable"
    assert post(http, "/v1/attention/weights", query=[[1.0, 0]], kernel="materialized")["weights"] == [[1]]


EDITS = [
    {"tap": "scores", "heads": [1], "queries": [0, 2], "keys": [3], "set": 2.5},
    {"tap": "weights", "heads": [0], "keys": [1], "set": 0, "renormalize": True},
    {"tap": "context", "set": 0},
]


@pytest.mark.parametrize("chosen", [{}, {"select": {"heads": [1], "queries": [2, 0]}}])
def test_edits_are_applied_before_one_looks(http, rng, chosen):
    x = rng.normal(size=(2, 2, 6, 4)).tolist()
    returned = {"return": ["weights"]}
    whole = np.array(
        post(http, "/v1/attention/forward", query=x, edits=EDITS, key_lengths=[6, 4], **returned)["weights"]
    )
    reply = post(http, "/v1/attention/weights", query=x, edits=EDITS, key_lengths=[6, 4], top_k=2, **chosen)
    part = whole[:, [1]][:, :, [2, 0]] if chosen else whole
    np.testing.assert_allclose(reply["weights"], part, atol=1e-6)
    np.testing.assert_allclose(reply["top"]["weights"], -np.sort(-part, -1)[..., :2], atol=1e-6)
    for row, real in enumerate((6, 4)):
        for name, value in statistics(whole[row], np.arange(6), np.arange(real)).items():
            np.testing.assert_allclose(reply["statistics"][name][row], value, atol=1e-5, err_msg=name)

"""What keys receive, pairs, and corrected weights, over HTTP: against loops over the weights of the same reply."""

import numpy as np
import pytest
import torch
from transformers.models.esm.modeling_esm import average_product_correct, symmetrize

from attention_service.core.inspection.average_product import average_product_corrected
from tests.api.talk import post, refuse
from tests.weight_loops import corrected, of_pairs, received

LENGTHS = (7, 5)
PAIRS = [[[0, 3], [5, 5], [6, 1]], [[4, 2]]]
CANDIDATES = [[1, 3, 5], [0, 2]]
PATH = "/v1/attention/weights"


def numbers(value):
    return np.array(value, np.float64)  # "NaN" too


def test_the_correction_is_that_of_esm_and_leaves_nothing_of_a_product(rng):
    weights = torch.from_numpy(rng.dirichlet(np.ones(9), (2, 3, 9)))
    ours = average_product_corrected(weights)
    torch.testing.assert_close(ours, average_product_correct(symmetrize(weights)), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(ours[1, 2], corrected(weights[1, 2].numpy()), atol=1e-12)
    column = torch.from_numpy(rng.random((4, 1)))
    product = column @ column.T  # a symmetric matrix of rank one is its own expectation
    torch.testing.assert_close(average_product_corrected(product), torch.zeros(4, 4).double(), atol=1e-12, rtol=0)
    assert not average_product_corrected(torch.zeros(3, 3)).any()


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalize", [None, "absolute", "apc"])
def test_pairs_and_received_weights_of_grouped_heads(http, rng, dtype, causal, normalize):
    tolerance = 1e-6 if dtype == "float32" else 4e-3
    q, k = rng.normal(size=(2, 4, 7, 4)), rng.normal(size=(2, 2, 7, 4))
    fields = {
        name: {"dtype": dtype, "shape": x.shape, "data": x.ravel().tolist()}
        for name, x in (("query", q), ("key", k), ("value", k))
    }
    spec = {"masks": [{"name": "causal"}]} if causal else {}
    chosen = {"statistics": ["pairs", "received", "max_weight"], "key_lengths": [*LENGTHS], "normalize": normalize}
    reply = post(http, PATH, **fields, **chosen, spec=spec, statistic_options={"pairs": PAIRS})
    among = post(
        http, PATH, **fields, **chosen, spec=spec, statistic_options={"pairs": PAIRS, "candidates": CANDIDATES}
    )["statistics"]["pairs"]  # fmt: skip
    raw = numbers(post(http, PATH, **fields, spec=spec, key_lengths=[*LENGTHS])["weights"])
    for row, head in np.ndindex(2, 4):
        size = LENGTHS[row]
        weights = raw[row, head, :size, :size]
        visible = np.tril(np.ones((size, size), bool)) if causal else np.ones((size, size), bool)
        if normalize == "apc":
            weights, visible = corrected(weights), np.ones_like(visible)
            np.testing.assert_allclose(reply["weights"][row][head][:size], np.pad(weights, ((0, 0), (0, 7 - size))),
                                       atol=2 * tolerance)  # fmt: skip
        statistics = {name: numbers(x[row][head]) for name, x in reply["statistics"].items() if name != "pairs"}
        assert np.isnan(statistics["received"][size:]).all()
        np.testing.assert_allclose(statistics["received"][:size], received(weights, visible), atol=tolerance)
        np.testing.assert_allclose(statistics["max_weight"], weights.max(-1).mean(), atol=tolerance)
        for found, own in ((reply["statistics"]["pairs"], None), (among, CANDIDATES[row])):
            expected = of_pairs(weights, PAIRS[row], own)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_allclose(found[name][row][head], value, atol=2 * tolerance, err_msg=name)


def test_one_list_is_of_all_texts_and_a_comparison_subtracts(http, rng):
    x = rng.normal(size=(2, 3, 5, 4)).tolist()
    one = {"statistics": ["pairs", "received"], "statistic_options": {"pairs": [[1, 0], [4, 2]], "candidates": [0, 2]}}
    each = one | {"statistic_options": {"pairs": [[[1, 0], [4, 2]]] * 2, "candidates": [[0, 2]] * 2}}
    found = post(http, PATH, query=x, **one)["statistics"]
    assert post(http, PATH, query=x, **each)["statistics"] == found
    edits = [{"tap": "scores", "heads": [1], "keys": [2], "set": 3.0}]
    edited = post(http, PATH, query=x, **one, edits=edits, compare="unedited")
    for name in ("share", "both_share"):
        change = np.subtract(edited["statistics"]["pairs"][name], found["pairs"][name])
        np.testing.assert_allclose(edited["differences"]["statistics"]["pairs"][name], change, atol=1e-6)
        assert not change[:, 0].any()
        assert (change[:, 1] > 0).all()


def test_a_single_sequence_and_corrected_top_keys(http, rng):
    x = rng.normal(size=(3, 6, 4))
    edits = [{"tap": "weights", "keys": [1], "scale": 2.0}]
    reply = post(
        http, PATH, query=x.tolist(), statistics=["received"], normalize="apc", top_k=6, pool=3, key_lengths=[4],
        compare="unedited", edits=edits,
    )  # fmt: skip
    plain = numbers(post(http, PATH, query=x.tolist(), key_lengths=[4])["weights"])
    edited = plain * np.where(np.arange(6) == 1, 2, 1)
    expected, before = (np.stack([corrected(each[:4, :4]) for each in of]) for of in (edited, plain))
    assert np.shape(reply["statistics"]["received"]) == (3, 6)
    keys, weights = reply["top"]["keys"], numbers(reply["top"]["weights"])
    for head in range(3):
        assert np.array(keys)[head, :4, :4].tolist() == np.argsort(-expected[head], -1).tolist()
        assert (np.array(keys)[head, :4, 4:] == -1).all()  # padding
        assert (np.array(keys)[head, 4:] == -1).all()
        np.testing.assert_allclose(weights[head, :4, :4], -np.sort(-expected[head], -1), atol=1e-6)
    np.testing.assert_allclose(numbers(reply["weights"])[:, :4, :4], expected, atol=1e-6)
    np.testing.assert_allclose(
        numbers(reply["differences"]["weights"])[:, :4, :4], expected - before, atol=1e-6
    )  # fmt: skip
    np.testing.assert_allclose(numbers(reply["pooled"])[:, 0, 0], expected[:, :3, :3].max((1, 2)), atol=1e-6)


def test_cross_attention_has_pairs_in_one_direction(http, rng):
    q, k = rng.normal(size=(2, 4, 4)).tolist(), rng.normal(size=(2, 6, 4))
    reply = post(http, PATH, query=q, key=k.tolist(), value=k.tolist(), statistics=["pairs", "received"],
                 statistic_options={"pairs": [[3, 5], [0, 1]]})  # fmt: skip
    weights, pairs = numbers(reply["weights"]), reply["statistics"]["pairs"]
    np.testing.assert_allclose(pairs["share"], (weights[:, 3, 5] + weights[:, 0, 1]) / 2, atol=1e-6)
    first = [(each[3].argmax() == 5) / 2 + (each[0].argmax() == 1) / 2 for each in weights]
    np.testing.assert_allclose(pairs["first"], first, atol=1e-6)
    assert {*pairs["swapped_share"], *pairs["both_first"]} == {"NaN"}
    np.testing.assert_allclose(reply["statistics"]["received"], weights.mean(1), atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"statistics": ["pairs"]}, "statistic_options.pairs"),
        ({"statistics": ["pairs"], "statistic_options": {"pairs": []}}, "statistic_options.pairs"),
        ({"statistics": ["pairs"], "statistic_options": {"pairs": [[[0, 1]], []]}}, "statistic_options.pairs.1"),
        ({"statistics": ["pairs"], "statistic_options": {"pairs": [[0, 1], [3, 0]]}}, "statistic_options.pairs.1.0"),
        ({"statistics": ["pairs"], "statistic_options": {"pairs": [[[0, 1]], [[0, 3]]]}},
         "statistic_options.pairs.1.0.1"),
        ({"statistics": ["pairs"], "statistic_options": {"pairs": [[[0, 1]]] * 3}}, "statistic_options.pairs"),
        ({"statistics": ["pairs"], "statistic_options": {"pairs": [[0, -1]]}}, "statistic_options.pairs.0.1"),
        ({"statistics": ["pairs"], "statistic_options": {"pairs": [[0, 1]], "candidates": [0, 3]}},
         "statistic_options.candidates.1"),
        ({"statistics": ["pairs"], "statistic_options": {"pairs": [[0, 1]], "candidates": [[0]]}},
         "statistic_options.candidates"),
        ({"statistic_options": {"pairs": [[0, 1]]}}, "statistic_options.pairs"),
        ({"statistic_options": {"candidates": [0]}}, "statistic_options.candidates"),
        ({"normalize": "apc", "statistics": ["received", "entropy"]}, "statistics.1"),
        ({"normalize": "apc", "key": [[[1.0, 0]]] * 2, "value": [[[1.0, 0]]] * 2}, "normalize"),
        ({"normalize": "apc", "spec": {"method": {"name": "linear"}}}, "normalize"),
        ({"normalize": "apc", "spec": {"add_zero_attn": True}}, "normalize"),
    ],
)  # fmt: skip
def test_pairs_and_corrections_that_there_are_not_are_refused(http, fields, param):
    query = [[[1.0, 0], [0, 1], [1, 1]]] * 2
    body = {"query": [[each] for each in query]} | fields
    for name in ("key", "value"):
        if name in fields:
            body[name] = [[each] for each in fields[name]]
    problem = refuse(http, PATH, **body)
    assert (problem["status"], problem["param"]) == (422, param), problem


def test_a_module_corrects_self_attention_alone(http, rng):
    post(http, "/v1/modules", name="corrected", config={"d_model": 8, "num_heads": 2, "num_kv_heads": 1}, seed=0)
    x = rng.normal(size=(5, 8)).tolist()
    path = "/v1/modules/corrected/weights"
    options = {"statistics": ["pairs"], "statistic_options": {"pairs": [[4, 0]]}, "normalize": "apc"}
    plain = numbers(post(http, path, query=x)["weights"])
    reply = post(http, path, query=x, **options)
    for head in range(2):
        expected = corrected(plain[head])
        np.testing.assert_allclose(reply["weights"][head], expected, atol=1e-6)
        np.testing.assert_allclose(reply["statistics"]["pairs"]["share"][head], expected[4, 0], atol=1e-6)
    assert refuse(http, path, query=x, key=x, **options)["param"] == "normalize"
    http.delete("/v1/modules/corrected")

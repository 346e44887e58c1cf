"""Chosen statistics of heads, over HTTP: each against its definition in plain numpy, in float64."""

import numpy as np
import pytest
import torch
from scipy.stats import somersd

from attention_service.core.blocks import tiles
from attention_service.core.inspection.statistics import CLASS_SHARES, HEAD_STATISTICS
from attention_service.core.inspection.weights import TiledWeights, positions_of, real_queries, top, totals
from attention_service.core.problem import Problem, Selection
from tests.api.talk import post, refuse

WINDOW, SINKS = 2, 3
REAL = (9, 6)
TOKENS = np.array([[5, 7, 5, 7, 8, 5, 5, 1, 7], [1, 2, 1, 2, 1, 3, 4, 4, 4]])


def defined(w, tokens, position, key):
    """Each statistic of one weight's contribution: its share times a factor of query position and key."""
    before = [j for j in range(position) if tokens[j] == tokens[position]]
    distance = key - position
    return {
        "entropy": -np.log(w) if w > 0 else 0.0,
        "mean_distance": abs(distance),
        "signed_distance": distance,
        "locality": abs(distance) <= WINDOW,
        "first_key": key == 0,
        "sink_share": key < SINKS,
        "own_position": distance == 0,
        "previous_token": distance == -1,
        "next_token": distance == 1,
        "duplicate_token": key in before,
        "induction": key - 1 in before,
    }


def by_loops(weights, tokens, real):
    """Every statistic of weights ``[Q, K]`` of one head, by loops over queries and keys."""
    rows: dict[str, list[float]] = {}
    for i in range(real):
        found: dict[str, float] = {}
        for j, w in enumerate(weights[i]):
            for name, factor in defined(w, tokens, i, j).items():
                found[name] = found.get(name, 0.0) + w * factor
        found |= {"max_weight": max(weights[i]), "effective_keys": np.exp(found["entropy"])}
        for name, value in found.items():
            rows.setdefault(name, []).append(value)
    return {name: np.mean(values) for name, values in rows.items()} | {"alignment": ordered(weights[:real])}


def ordered(weights):
    """Somers' D of the key on the query, by a loop over pairs of queries and of keys; rows sum to one."""
    found = []
    for one in range(len(weights)):
        for later in range(one + 1, len(weights)):
            signs = [
                weights[one][i] * weights[later][j] * np.sign(j - i)
                for i in range(len(weights[one])) for j in range(len(weights[one]))
            ]  # fmt: skip
            found.append(sum(signs))
    return np.mean(found)


def test_alignment_is_somers_d(rng):
    """Of counts of keys by query: scipy's takes a table of integers."""
    counts = rng.integers(0, 9, (6, 1))
    table = np.stack([rng.multinomial(40, rng.dirichlet(np.ones(5))) for _ in counts])
    assert ordered(table / 40) == pytest.approx(somersd(table).statistic)


@pytest.mark.parametrize(("q", "expected"), [([0, 1, 2, 3], 1.0), ([3, 2, 1, 0], -1.0), ([1, 1, 1, 1], 0.0)])
def test_alignment_of_heads_that_look_forward_back_and_at_one_key(http, q, expected):
    keys, queries = np.eye(4), 1e3 * np.eye(4)[q]
    fields = {"query": queries.tolist(), "key": keys.tolist(), "value": keys.tolist(), "statistics": ["alignment"]}
    assert post(http, "/v1/attention/weights", **fields)["statistics"]["alignment"] == pytest.approx(expected, abs=1e-6)
    single = fields | {"query": queries[:1].tolist()}
    assert post(http, "/v1/attention/weights", **single)["statistics"]["alignment"] == "NaN"


@pytest.mark.parametrize("causal", [False, True])
def test_every_statistic_follows_its_definition(http, rng, causal):
    x = rng.normal(size=(2, 3, 9, 4))
    spec = {"masks": [{"name": "causal"}]} if causal else {}
    options = {
        "window": WINDOW, "sinks": SINKS, "tokens": TOKENS.tolist(),
        "classes": {"even": [j % 2 == 0 for j in range(9)]}, "token_classes": {"sevens": [7, 8]},
    }  # fmt: skip
    reply = post(
        http, "/v1/attention/weights", query=x.tolist(), spec=spec, key_lengths=[*REAL],
        statistics=[*HEAD_STATISTICS, CLASS_SHARES], statistic_options=options,
    )  # fmt: skip
    assert set(reply["statistics"]) == {*HEAD_STATISTICS, CLASS_SHARES}
    weights = np.array(reply["weights"], np.float64)
    for row, head in np.ndindex(2, 3):
        for name, value in by_loops(weights[row, head], TOKENS[row], REAL[row]).items():
            np.testing.assert_allclose(reply["statistics"][name][row][head], value, atol=2e-5, err_msg=name)
        rows = weights[row, head, : REAL[row]]
        shares = {"even": rows[:, ::2], "sevens": rows[:, np.isin(TOKENS[row], [7, 8])]}
        for name, of in shares.items():
            share = reply["statistics"]["classes"][name][row][head]
            np.testing.assert_allclose(share, of.sum(-1).mean(), atol=2e-5, err_msg=name)


def test_the_mass_of_a_learned_sink_is_its_share_of_the_softmax(http, rng):
    x, sinks = rng.normal(size=(2, 3, 9, 4)), rng.normal(size=3)
    fields = {"query": x.tolist(), "key_lengths": [*REAL], "statistics": ["sink_mass"]}
    spec = {"normalizer": {"name": "softmax", "sinks": True}}
    reply = post(http, "/v1/attention/weights", spec=spec, parameters={"sinks": sinks.tolist()}, **fields)
    for row, head in np.ndindex(2, 3):
        own = x[row, head, : REAL[row]]
        sink = np.exp(sinks[head])
        mass = sink / (sink + np.exp(own @ own.T / 2).sum(-1))
        np.testing.assert_allclose(reply["statistics"]["sink_mass"][row][head], mass.mean(), atol=1e-6)
    learned = {"spec": spec, "parameters": {"sinks": sinks.tolist()}}
    for other in (
        fields, learned | fields | {"edits": [{"tap": "weights", "set": 0}]}, fields | {"statistics": ["chosen_share"]}
    ):  # fmt: skip
        assert refuse(http, "/v1/attention/weights", **other)["param"] == "statistics.0"


def copied(weights, tokens, following, needle):
    """The needle's keys that a head copies: those most attended by a query that their token comes after."""
    keys = set()
    for row, token in zip(weights, following, strict=True):
        key = max(range(len(row)), key=lambda j: row[j])
        if key in needle and tokens[key] == token:
            keys.add(key)
    return len(keys) / len(needle) if needle else np.nan


@pytest.mark.parametrize("causal", [False, True])
def test_retrieval_is_the_share_of_a_needle_that_is_copied(http, rng, causal):
    x, tokens = 3 * rng.normal(size=(2, 3, 40, 4)), rng.integers(0, 3, (2, 40))
    needle = np.zeros((2, 40), bool)
    needle[0, 3:15] = True  # the second text has none
    fields = {
        "query": x.tolist(),
        "spec": {"masks": [{"name": "causal"}]} if causal else {},
        "statistics": ["retrieval"],
    }
    options = {"tokens": tokens.tolist(), "needle": needle.tolist()}
    reply = post(http, "/v1/attention/weights", **fields, statistic_options=options)
    answered = np.where(np.arange(40) >= 20, np.roll(tokens, -1), -1)
    last = post(
        http, "/v1/attention/weights", **fields, statistic_options=options | {"next_tokens": answered.tolist()}
    )  # fmt: skip
    weights, found = np.array(reply["weights"], np.float64), []
    for head in range(3):
        following = [*tokens[0, 1:], -1]
        found.append(copied(weights[0, head], tokens[0], following, range(3, 15)))
        np.testing.assert_allclose(reply["statistics"]["retrieval"][0][head], found[-1], rtol=1e-6)
        own = copied(weights[0, head], tokens[0], answered[0], range(3, 15))
        np.testing.assert_allclose(last["statistics"]["retrieval"][0][head], own, rtol=1e-6)
    assert reply["statistics"]["retrieval"][1] == ["NaN"] * 3
    assert 0 < min(found) <= max(found) < 1


def test_tokens_of_queries_may_be_given(http, rng):
    q, k = rng.normal(size=(3, 4)).tolist(), rng.normal(size=(5, 4)).tolist()
    options = {"tokens": [1, 2, 3, 1, 9], "query_tokens": [0, 0, 1]}
    reply = post(
        http, "/v1/attention/weights", query=q, key=k, value=k, statistics=["duplicate_token"],
        statistic_options=options, offsets=2,
    )  # fmt: skip
    weights = np.array(reply["weights"])
    expected = (weights[2, 0] + weights[2, 3]) / 3  # the third query is at position 4
    assert reply["statistics"] == {"duplicate_token": pytest.approx(expected, abs=1e-6)}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"statistics": ["induction"]}, "statistic_options.tokens", "invalid_request"),
        ({"statistics": ["classes"]}, "statistic_options.classes", "invalid_request"),
        ({"statistics": ["retrieval"]}, "statistic_options.tokens", "invalid_request"),
        (
            {"statistics": ["retrieval"], "statistic_options": {"tokens": [1, 2]}},
            "statistic_options.needle",
            "invalid_request",
        ),
        ({"statistic_options": {"needle": [True]}}, "statistic_options.needle", "shape_mismatch"),
        ({"statistic_options": {"next_tokens": [1, 2, 3]}}, "statistic_options.next_tokens", "shape_mismatch"),
        (
            {"statistics": ["classes"], "statistic_options": {"token_classes": {"x": [1]}}},
            "statistic_options.tokens",
            "invalid_request",
        ),
        ({"statistic_options": {"tokens": [1, 2, 3]}}, "statistic_options.tokens", "shape_mismatch"),
        ({"statistic_options": {"window": -1}}, "statistic_options.window", "invalid_request"),
        ({"statistics": ["nonsense"]}, "statistics.0", "invalid_request"),
    ],
)
def test_missing_or_misshapen_inputs_of_statistics_are_refused(http, fields, param, code):
    problem = refuse(http, "/v1/attention/weights", query=[[1.0, 0], [0, 1]], **fields)
    assert (problem["status"], problem["param"], problem["code"]) == (422, param, code)


def test_a_comparison_is_the_edited_minus_the_unedited(http, rng):
    x = rng.normal(size=(2, 6, 4)).tolist()
    edits = [{"tap": "scores", "heads": [1], "keys": [3], "set": 3.0}]
    body = {"query": x, "statistics": ["entropy", "locality"], "statistic_options": {"window": 1}}
    without = post(http, "/v1/attention/weights", **body)
    reply = post(http, "/v1/attention/weights", **body, edits=edits, compare="unedited")
    for name in ("entropy", "locality"):
        change = np.subtract(reply["statistics"][name], without["statistics"][name])
        np.testing.assert_allclose(reply["differences"]["statistics"][name], change, atol=1e-6)
        assert change[0] == 0
        assert abs(change[1]) > 1e-4
    change = np.subtract(reply["weights"], without["weights"])
    np.testing.assert_allclose(reply["differences"]["weights"], change, atol=1e-7)
    averaged = post(http, "/v1/attention/weights", **body, edits=edits, compare="unedited", average_heads=True)
    np.testing.assert_allclose(averaged["differences"]["weights"], change.mean(0), atol=1e-7)


def test_the_client_sends_tokens_and_reads_chosen_statistics(client, rng):
    x = rng.normal(size=(1, 2, 4, 4)).astype(np.float32)
    reply = client.attention.weights(
        x, statistics=["induction", "classes"], return_weights=False,
        statistic_options={"tokens": np.array([[1, 2, 1, 2]]), "classes": {"last": np.arange(4) == 3}},
    )  # fmt: skip
    assert reply.statistics.induction.shape == (1, 2)
    assert reply.statistics.classes["last"].shape == (1, 2)
    assert reply.statistics.entropy is None


def test_tiles_of_single_heads_give_the_same():
    """Many keys make a block of all heads few queries: the heads are then inspected one by one."""
    made = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 4, n, 8, generator=made) for n in (40, 20_000))
    problem = Problem(q, k, k)
    assert {tile.heads for tile in tiles(problem, Selection())} == {(0,), (1,), (2,), (3,)}
    values, keys = top(problem, Selection(heads=(2, 0)), 3)
    weights = (q.double() @ k.double().mT / 8**0.5).softmax(-1)
    expected = weights[:, [2, 0]].topk(3)
    assert torch.equal(keys, expected.indices)
    torch.testing.assert_close(values.double(), expected.values, atol=1e-5, rtol=1e-4)
    found = totals(problem, real_queries(problem), tiles(problem, Selection()), TiledWeights(problem).compute)
    assert found.queries.tolist() == [40]
    distance = (positions_of(problem)[0, :, None] - torch.arange(20_000)).abs()
    means = found.means()
    torch.testing.assert_close(means["entropy"], torch.special.entr(weights).sum(-1).mean(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(means["mean_distance"], (weights * distance).sum(-1).mean(-1), rtol=1e-5, atol=1e-3)

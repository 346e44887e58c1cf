"""Rollout against a product by hand, flow against networkx's, in a graph made by its definition."""

import networkx as nx
import numpy as np
import pytest
import torch

from attention_service.core.inspection.head_reader import UnfitNumbers
from attention_service.core.inspection.rollout import flows, mixed, relevance, rolled_out


def weights(rng, layers, heads, tokens, causal=False):
    made = rng.random((layers, heads, tokens, tokens)) ** 3
    if causal:
        made = np.tril(made)
    return made / made.sum(-1, keepdims=True)


def by_hand(made, residual, combine):
    """M of each layer by its definition."""
    for heads in made:
        a = {"mean": heads.mean(0), "max": heads.max(0), "min": heads.min(0)}[combine]
        yield residual * np.eye(len(a)) + (1 - residual) * a / a.sum(-1, keepdims=True)


def top_down(made, combine="mean", residual=0.5):
    return [mixed(torch.from_numpy(heads), combine, residual) for heads in made[::-1]]


@pytest.mark.parametrize("combine", ["mean", "max", "min"])
@pytest.mark.parametrize("residual", [0.0, 0.3])
def test_rollout_is_the_product_of_the_layers(combine, residual, rng):
    made = weights(rng, 4, 3, 6)
    found = rolled_out(top_down(made, combine, residual), [5, 0])
    expected = np.linalg.multi_dot(list(by_hand(made, residual, combine))[::-1])[[5, 0]]
    np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose(found.sum(-1), 1)


@pytest.mark.parametrize("causal", [False, True])
def test_flow_is_the_maximum_flow_of_the_graph_of_tokens(causal, rng):
    made = weights(rng, 3, 2, 5, causal)
    graph = nx.DiGraph()
    for level, m in enumerate(by_hand(made, 0.5, "mean")):
        for i in range(5):
            for j in range(5):
                graph.add_edge((level + 1, i), (level, j), capacity=m[i, j])
    found = flows(top_down(made), [4, 1])
    expected = [[nx.maximum_flow_value(graph, (3, i), (0, j)) for j in range(5)] for i in (4, 1)]
    np.testing.assert_allclose(found, expected, atol=1e-7)


def test_a_token_that_attends_to_nothing_keeps_its_state():
    found = mixed([torch.tensor([[0.0, 0.0], [0.5, 0.5]])], "mean", 0.5)
    assert found.tolist() == [[1, 0], [0.25, 0.75]]


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf")])
def test_what_are_no_weights_is_refused(wrong):
    with pytest.raises(UnfitNumbers):
        mixed([torch.tensor([[wrong]])], "mean", 0.5)


@pytest.mark.parametrize("causal", [False, True])
def test_the_smallest_weights_of_each_row_are_left_out(causal, rng):
    (made,) = weights(rng, 1, 2, 7, causal)
    found = mixed(torch.from_numpy(made), "mean", 0.25, discard=0.5)
    for i, row in enumerate(made.mean(0)):
        seen = np.flatnonzero(row)
        kept = sorted(seen, key=lambda j: row[j])[int(len(seen) / 2) :]
        expected = np.where(np.isin(np.arange(7), kept), row, 0)
        np.testing.assert_allclose(found[i], 0.25 * np.eye(7)[i] + 0.75 * expected / expected.sum(), atol=1e-12)


def test_relevance_accumulates_positive_parts(rng):
    """The update of Chefer et al. 2021, layer by layer from below."""
    signed = rng.normal(size=(3, 2, 5, 5))
    found = rolled_out([relevance(torch.from_numpy(heads)) for heads in signed[::-1]], [4, 0])
    expected = np.eye(5)
    for heads in signed:
        expected = expected + heads.clip(min=0).mean(0) @ expected
    np.testing.assert_allclose(found, expected[[4, 0]], rtol=1e-12)
    with pytest.raises(UnfitNumbers, match="finite"):
        relevance([torch.tensor([[float("nan")]])])

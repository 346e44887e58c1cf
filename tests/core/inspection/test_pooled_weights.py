"""Pooled weights: of every square of queries and keys, the extreme of the weights themselves."""

from functools import partial

import numpy as np
import pytest
import torch

from attention_contract.spec import AttentionSpec
from attention_service.core import blocks
from attention_service.core.inspection.weights import pooled_differences, pooled_weights, weights_of
from attention_service.core.problem import Problem, Selection


def extremes(weights, size):
    """The value of largest magnitude of each square, one square after the other."""
    rows, columns = weights.shape[-2:]
    found = np.empty((*weights.shape[:-2], -(-rows // size), -(-columns // size)))
    for row, column in np.ndindex(found.shape[-2:]):
        square = weights[..., row * size : (row + 1) * size, column * size : (column + 1) * size]
        square = square.reshape(*weights.shape[:-2], -1)
        found[..., row, column] = np.take_along_axis(square, np.abs(square).argmax(-1, keepdims=True), -1)[..., 0]
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("scores_at_once", [2**20, 200])
@pytest.mark.parametrize("selection", [Selection(), Selection(heads=(2, 0), queries=(1, 5, 6, 7, 30))])
@pytest.mark.parametrize("size", [2, 7, 64])
def test_squares_have_the_extremes_of_the_weights(monkeypatch, size, selection, scores_at_once):
    monkeypatch.setattr(blocks, "SCORES_AT_ONCE", scores_at_once)
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn(2, 3, length, 4, generator=generator) for length in (31, 45))
    problem, other = (Problem(q * scale, k, k, AttentionSpec()) for scale in (1, 2))
    weights, without = partial(weights_of, problem), partial(weights_of, other)
    expected = weights(selection).numpy()
    found = pooled_weights(problem, selection, size, weights)
    np.testing.assert_allclose(found, extremes(expected, size), rtol=1e-5)
    changed = pooled_differences(problem, selection, size, weights, without)
    np.testing.assert_allclose(changed, extremes(expected - without(selection).numpy(), size), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (3, 0), (0, 0)])
def test_no_queries_or_keys_make_no_squares(queries, keys):
    q, k = torch.ones(2, 3, queries, 4), torch.ones(2, 3, keys, 4)
    problem = Problem(q, k, k, AttentionSpec())
    weights = partial(weights_of, problem)
    shape = 2, 3, -(-queries // 2), -(-keys // 2)
    assert pooled_weights(problem, Selection(), 2, weights).shape == shape
    assert pooled_differences(problem, Selection(), 2, weights, weights).shape == shape

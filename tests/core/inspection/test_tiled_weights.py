"""Weights that are computed tile by tile are the weights, also where tiles leave out keys that no query sees."""

from functools import partial

import pytest
import torch

from attention_contract.spec import AttentionSpec, Causal, ScaledDot, SlidingWindow, Softmax
from attention_service.core import blocks
from attention_service.core.attention import attend
from attention_service.core.edits import BoundEdit
from attention_service.core.inspection.statistics import HEAD_STATISTICS, StatisticInputs
from attention_service.core.inspection.weights import ComputedTile, TiledWeights, real_queries, totals, weights_of
from attention_service.core.problem import Problem, Selection
from attention_service.core.slices import rehearsed_on

MASKS = {
    "none": [],
    "causal": [Causal()],
    "bottom right": [Causal(align="bottom_right")],
    "window": [SlidingWindow(left=5, right=0)],
}


@pytest.mark.sampled
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("rows", [100, 20])
def test_kept_tiles_are_the_weights_and_give_their_statistics(masks, edited, padded, rows, monkeypatch):
    monkeypatch.setattr(blocks, "SCORES_AT_ONCE", rows * 64)  # a few rows of all heads, or rows of single heads
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 40, 8), torch.randn(2, 3, 64, 8)
    key_mask = torch.rand(2, 64) < 0.9 if padded else None
    problem = Problem(q, k, torch.randn(2, 3, 64, 5), AttentionSpec(masks=MASKS[masks]), key_mask=key_mask)
    edits = [BoundEdit("weights", keys=(63,), set=0.5)] if edited else []
    weights = partial(weights_of, problem, edits=edits)
    kept = TiledWeights(problem, edits, keep=True, with_context=True)
    names = [name for name in HEAD_STATISTICS if name not in {"duplicate_token", "induction"}]
    tokens = torch.arange(64).expand(2, -1) % 7
    inputs = StatisticInputs(tokens=tokens, query_tokens=tokens[:, :40])
    tiles = blocks.tiles(problem, Selection())
    assert len(tiles) > 2
    names += ["duplicate_token", "induction"]
    found = totals(problem, real_queries(problem), tiles, kept.compute, names, inputs).means()
    expected = totals(
        problem, real_queries(problem), [Selection()], lambda tile: ComputedTile(weights(tile)), names, inputs
    ).means()
    torch.testing.assert_close(kept.whole, weights(Selection()))
    torch.testing.assert_close(kept.context, attend(problem, edits=edits, kernel="materialized").context)
    torch.testing.assert_close(kept.read(Selection(heads=(1,), queries=(30, 2))), kept.whole[:, [1]][:, :, [30, 2]])
    for name in names:
        torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_one_traversal_without_the_weights_gives_statistics_and_context(masks, padded, temperature, monkeypatch):
    """Scores of some hundreds leave most weights at exactly zero; some queries see no key."""
    monkeypatch.setattr(blocks, "SCORES_AT_ONCE", 20 * 64)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 40, 8) * 30, torch.randn(2, 3, 64, 8) * 3, torch.randn(2, 3, 64, 5)
    key_mask = torch.rand(2, 64) < 0.9 if padded else None
    if key_mask is not None:
        key_mask[:, :8] = False
    spec = AttentionSpec(masks=MASKS[masks], normalizer=Softmax(temperature=temperature))
    problem = Problem(q, k, v, spec, key_mask=key_mask)
    exact = Problem(q.double(), k.double(), v.double(), spec, key_mask=key_mask)
    names = [name for name in HEAD_STATISTICS if name not in {"duplicate_token", "induction"}]
    real = torch.ones(2, 40, dtype=torch.bool)
    tiled = TiledWeights(problem, with_context=True)
    found = totals(problem, real, blocks.tiles(problem, Selection()), tiled.compute, names)
    [whole] = [ComputedTile(weights_of(exact, Selection()))]
    expected = totals(exact, real, [Selection()], lambda _: whole, names)
    assert torch.equal(found.queries, expected.queries)
    for name, mean in expected.means().items():
        torch.testing.assert_close(found.means()[name], mean, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(tiled.context, attend(problem, kernel="materialized").context, atol=1e-3, rtol=1e-3)


def test_small_entropies_keep_their_digits():
    """Of a softmax, −Σ p ln p is summed from the logarithms, not as a difference of large numbers."""
    q = torch.tensor([400.0, 1.0]).view(1, 1, 2, 1)
    k = torch.tensor([0.0, 1.0, 0.98]).view(1, 1, 3, 1)
    problem = Problem(q, k, k, AttentionSpec(score=ScaledDot(scale=1.0)))
    exact = Problem(q.double(), k.double(), k.double(), problem.spec)
    real = torch.tensor([[True, False]])
    found = totals(problem, real, [Selection()], TiledWeights(problem).compute, ["entropy"]).means()["entropy"]
    whole = ComputedTile(weights_of(exact, Selection()))
    expected = totals(exact, real, [Selection()], lambda _: whole, ["entropy"]).means()["entropy"]
    assert 0 < float(expected) < 0.01
    torch.testing.assert_close(found, expected, atol=0, rtol=2e-4)


def test_a_tile_on_a_gpu_has_eight_times_as_many_scores():
    """Each operation on a tile is a launch there."""
    q = torch.empty(1, 32, 1024, 64, device="meta")
    problem, counts = Problem(q, q, q, AttentionSpec(masks=[Causal()])), []
    for threads in (1, 0):
        with rehearsed_on(threads):
            counts.append(len(blocks.tiles(problem, Selection())))
    assert counts == [32, 4]

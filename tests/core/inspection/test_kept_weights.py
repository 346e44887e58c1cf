"""Weights that are kept tile by tile are the weights, also where tiles leave out keys that no query sees."""

from functools import partial

import pytest
import torch

from attention_contract.spec import AttentionSpec, Causal, SlidingWindow
from attention_service.core import blocks
from attention_service.core.attention import attend
from attention_service.core.edits import BoundEdit
from attention_service.core.inspection.statistics import HEAD_STATISTICS, StatisticInputs
from attention_service.core.inspection.weights import KeptWeights, real_queries, totals, weights_of
from attention_service.core.problem import Problem, Selection

MASKS = {
    "none": [],
    "causal": [Causal()],
    "bottom right": [Causal(align="bottom_right")],
    "window": [SlidingWindow(left=5, right=0)],
}


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
    kept = KeptWeights(problem, edits, with_context=True)
    names = [name for name in HEAD_STATISTICS if name not in {"duplicate_token", "induction"}]
    tokens = torch.arange(64).expand(2, -1) % 7
    inputs = StatisticInputs(tokens=tokens, query_tokens=tokens[:, :40])
    tiles = blocks.tiles(problem, Selection())
    assert len(tiles) > 2
    names += ["duplicate_token", "induction"]
    found = totals(problem, real_queries(problem), tiles, kept.compute, names, inputs).means()
    expected = totals(problem, real_queries(problem), [Selection()], weights, names, inputs).means()
    torch.testing.assert_close(kept.whole, weights(Selection()))
    torch.testing.assert_close(kept.context, attend(problem, edits=edits, kernel="materialized").context)
    torch.testing.assert_close(kept.read(Selection(heads=(1,), queries=(30, 2))), kept.whole[:, [1]][:, :, [30, 2]])
    for name in names:
        torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-5)

"""What keys receive, and pairs, of tiles of weights: against loops over whole weights in float64."""

import numpy as np
import pytest
import torch
from tests.weight_loops import of_pairs, received

from attention_contract.schemas.weights import StatisticOptions
from attention_contract.spec import AttentionSpec, Causal, SlidingWindow
from attention_service.core import blocks
from attention_service.core.edits import BoundEdit
from attention_service.core.inspection.statistics import StatisticInputs
from attention_service.core.inspection.weights import TiledWeights, real_queries, totals, weights_of
from attention_service.core.masks.visibility import visibility
from attention_service.core.problem import Problem, Selection
from attention_service.runtime.binding.bound_pairs import TextTokens, bind_pairs

LENGTH = 40
MASKS = {"none": [], "causal": [Causal()], "window": [SlidingWindow(left=3, right=0)]}
PAIRS = [[[0, 0], [7, 3], [7, 3], [39, 12], [30, 39]], [[5, 5], [2, 20]]]
CANDIDATES = [[0, 3, 12, 39], [5, 20, 1]]


def inputs_of(lengths=(LENGTH, LENGTH), candidates=None, *, same_tokens=True, pairs=PAIRS):
    options = StatisticOptions(pairs=pairs, candidates=candidates)
    texts = [TextTokens(range(LENGTH), range(length)) for length in lengths]
    bound = bind_pairs(options, texts, LENGTH, same_tokens=same_tokens)
    return StatisticInputs(pairs=bound.on(torch.device("cpu")))


@pytest.mark.sampled
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("rows", [7, 2])
def test_tiles_give_the_numbers_of_loops(masks, padded, rows, monkeypatch):
    monkeypatch.setattr(blocks, "SCORES_AT_ONCE", rows * 2 * 4 * LENGTH)  # some rows of all heads, or of single heads
    torch.manual_seed(0)
    q, k = 2 * torch.randn(2, 4, LENGTH, 8), torch.randn(2, 2, LENGTH, 8)  # two heads read one of the keys
    lengths = torch.tensor([LENGTH, 25]) if padded else None
    problem = Problem(q, k, torch.randn(2, 2, LENGTH, 5), AttentionSpec(masks=MASKS[masks]), key_lengths=lengths)
    tiles, real = blocks.tiles(problem, Selection()), real_queries(problem)
    assert len(tiles) > 3
    whole = weights_of(problem, Selection()).double().numpy() * real[:, None, :, None].numpy()
    allowed = visibility(problem).allowed
    visible = np.ones_like(whole, bool) if allowed is None else allowed.expand(whole.shape).numpy()
    for candidates in (None, CANDIDATES):
        inputs = inputs_of(candidates=candidates)
        found = totals(problem, real, tiles, TiledWeights(problem).compute, ["received", "pairs"], inputs).means()
        for row, head in np.ndindex(2, 4):
            seen = visible[row, head] & real[row, :, None].numpy()
            expected = received(whole[row, head], seen)
            np.testing.assert_allclose(found["received"][row, head], expected, atol=1e-6)
            own = None if candidates is None else [at for at in candidates[row] if real[row, at]]
            for name, value in of_pairs(whole[row, head], PAIRS[row], own).items():
                assert found["pairs"][name][row, head] == pytest.approx(value, abs=1e-6), name


def test_a_head_that_looks_at_known_keys_has_known_numbers():
    """Each query looks at key 2, which all see; each pair but one names it."""
    weights = torch.zeros(1, 1, 4, 4)
    weights[..., 2] = 1
    problem = Problem(*(torch.zeros(1, 1, 4, 2),) * 3, given=weights)
    options = StatisticOptions(pairs=[[0, 2], [1, 2], [2, 2], [3, 0]])
    bound = bind_pairs(options, [TextTokens(range(4), range(4))], 4, same_tokens=True)
    inputs = StatisticInputs(pairs=bound.on(torch.device("cpu")))
    found = totals(
        problem, real_queries(problem), [Selection()], TiledWeights(problem).compute, ["received", "pairs"], inputs
    ).means()
    assert found["received"][0, 0, 2] == 1
    assert found["received"][0, 0, [0, 1, 3]].isnan().all()  # without masks, no query is known to see them
    assert {name: float(x) for name, x in found["pairs"].items()} == {
        "share": 0.75, "first": 0.75,  # [2, 0], [2, 1] and [0, 3] are not looked at
        "swapped_share": 0.25, "swapped_first": 0.25, "both_share": 1.0, "both_first": 0.75,
    }  # fmt: skip


def test_queries_and_keys_of_two_texts_have_no_swapped_pair():
    q, k = torch.randn(2, 4, LENGTH, 8), torch.randn(2, 4, LENGTH, 8)
    problem = Problem(q, k, k)
    found = totals(
        problem, real_queries(problem), [Selection()], TiledWeights(problem).compute, ["pairs"],
        inputs_of(same_tokens=False),
    ).means()["pairs"]  # fmt: skip
    assert all(found[name].isnan().all() == ("_" in name) for name in found)
    assert (found["share"] > 0).all()


def test_weights_that_an_edit_gives_to_a_hidden_key_are_received():
    q = torch.randn(1, 1, 3, 4)
    problem = Problem(q, q, q, AttentionSpec(masks=[Causal()]))
    edits = [BoundEdit("weights", queries=(0,), keys=(2,), set=0.5)]
    tiled = TiledWeights(problem, edits)
    found = totals(problem, real_queries(problem), [Selection()], tiled.compute, ["received"]).means()["received"]
    whole = weights_of(problem, Selection(), edits)[0, 0]
    assert found[0, 0, 2] == pytest.approx(float(whole[:, 2].sum()) / 2)  # of queries 0 and 2

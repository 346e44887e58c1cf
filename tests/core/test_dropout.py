"""Dropout: a share of the weights, told by the seed alone, the same for every kernel and selection."""

from dataclasses import replace

import pytest
import torch

from attention_contract.spec import AttentionSpec
from attention_service.core.attention import attend
from attention_service.core.kernels import KERNELS, Needs, unsuitable
from attention_service.core.problem import Selection, WeightDropout
from attention_service.core.stages import kept_weights

ABLE = [
    entry.name for entry in KERNELS if not unsuitable(entry.name, AttentionSpec(), torch.float64, Needs(dropout=True))
]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped(make_problem, p):
    problem = make_problem(batch=3, heads=4, queries=64, keys=80, dropout=WeightDropout(p, seed=7))
    kept = kept_weights(problem).double()
    spread = (p * (1 - p)) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 4 * spread / kept.numel() ** 0.5
    for dim in range(4):  # nor does any sequence, head, query or key stand out
        others = [d for d in range(4) if d != dim]
        means = kept.mean(others)
        assert (means - (1 - p)).abs().max() < 5 * spread / (kept.numel() / kept.shape[dim]) ** 0.5
    pairs = kept - kept.mean()
    for dim in range(4):  # and neighbours know nothing of each other
        shifted = pairs.roll(1, dim)
        assert abs((pairs * shifted).mean()) / spread**2 < 5 / kept.numel() ** 0.5


def test_what_is_kept_depends_on_the_seed_and_the_place_alone(make_problem):
    problem = make_problem(queries=6, keys=9, dropout=WeightDropout(0.5, seed=1))
    kept = kept_weights(problem)
    assert kept.equal(kept_weights(problem))
    assert not kept.equal(kept_weights(replace(problem, dropout=WeightDropout(0.5, seed=2))))
    longer = make_problem(batch=3, heads=4, queries=8, keys=11, dropout=WeightDropout(0.5, seed=1))
    assert kept.equal(kept_weights(longer)[:2, :2, :6, :9])
    chosen = Selection(heads=(1,), queries=(4, 0))
    assert kept[:, [1]][:, :, [4, 0]].equal(kept_weights(problem, chosen))
    more = kept_weights(replace(problem, dropout=WeightDropout(0.2, seed=1)))
    assert (kept & ~more).count_nonzero() == 0  # a smaller share drops none that a larger one keeps


@pytest.mark.parametrize("kernel", ABLE)
def test_the_context_is_that_of_the_kept_weights(kernel, make_problem, every_mask):
    problem = make_problem(spec=AttentionSpec(masks=every_mask), dropout=WeightDropout(0.4, seed=3))
    taps = attend(problem, ("weights",), kernel="materialized").taps
    assert taps["weights"].equal(
        attend(replace(problem, dropout=None), ("weights",), kernel="materialized").taps["weights"]
    )
    dropped = taps["weights"] * kept_weights(problem) / 0.6
    expected = dropped @ problem.v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(attend(problem, kernel=kernel).context, expected, rtol=0, atol=1e-12)

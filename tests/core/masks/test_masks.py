"""Masks of positions, dense and counted, against their definitions."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.conftest import MASKS as EVERY_MASK
from tests.core.conftest import drawn_masks
from tests.plain_attention import draw, may_look

from attention_contract.spec import (
    AnyOf,
    Block,
    Causal,
    Documents,
    FixedStride,
    GlobalTokens,
    PrefixLM,
    RandomBlocks,
    SlidingWindow,
    Strided,
)
from attention_service.core.masks import pair_count
from attention_service.core.masks.pair_count import allowed_pairs
from attention_service.core.masks.random_blocks import DrawnBlocks
from attention_service.core.masks.rules import allowed
from attention_service.core.problem import Span


@pytest.mark.parametrize(
    ("queries", "keys", "past"), [(5, 6, 0), (6, 4, 0), (3, 9, 4), (1, 5, 4), (0, 3, 0), (3, 0, 0)]
)
def test_dense_masks_follow_their_definition(every_mask, queries, keys, past):
    surplus = keys - past - queries
    for offsets in (None, 0, -3, [0, 3]):
        mask = allowed(every_mask, queries, keys, past=past, offsets=None if offsets is None else torch.tensor(offsets))
        if not every_mask:
            assert mask is None
            continue
        starts = offsets if isinstance(offsets, list) else [past if offsets is None else offsets]
        assert mask.shape == (len(starts), 1, queries, keys)
        for b, i, j in product(range(len(starts)), range(queries), range(keys)):
            expected = all(may_look(each, i + starts[b], j, surplus, keys) for each in every_mask)
            assert bool(mask[b, 0, i, j]) == expected


lengths = st.integers(0, 12) | st.integers(0, 150)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(
    chosen=st.lists(drawn_masks(), max_size=3),
    queries=lengths,
    new=lengths,
    past=st.integers(0, 6),
    offset=st.none() | st.integers(-15, 15) | st.integers(-150, 150),
)
def test_the_count_is_that_of_the_dense_mask(chosen, queries, new, past, offset):
    keys = past + new
    dense = allowed(chosen, queries, keys, past=past, offsets=None if offset is None else torch.tensor(offset))
    expected = queries * keys if dense is None else int(dense.sum())
    assert allowed_pairs(chosen, queries, keys, past=past, offset=offset) == expected


SPARSE = {
    "window": [Causal(), SlidingWindow(left=100)],
    "longformer": [Causal(), AnyOf(of=[SlidingWindow(left=100), GlobalTokens(positions=list(range(8)))])],
    "prefix_lm": [PrefixLM(length=33_333)],
    "block": [Block(size=512, neighbours=1), Causal()],
    "strided": [Strided(stride=316), Causal()],
    "strided far": [Strided(stride=31_623), Causal()],
    "two strides": [AnyOf(of=[Strided(stride=3001), Strided(stride=3002)])],
    "fixed": [FixedStride(stride=128, summary=8), Causal()],
    "documents": [Documents(lengths=[20] * 4096), Causal()],
    "random": [RandomBlocks(size=1, count=8)],
    "bigbird": [
        AnyOf(
            of=[
                RandomBlocks(size=64, count=3),
                SlidingWindow(left=96, right=96),
                GlobalTokens(positions=list(range(8))),
            ]
        )
    ],
}


SELDOM = {"window", "prefix_lm", "block", "strided", "strided far", "random"}
"""Masks that stand in another of them, or differ from it in a number."""


@pytest.mark.sampled(name=1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SELDOM else name for name in SPARSE]
)
def test_many_pairs_are_counted_in_pieces(name):
    """Exactly up to 4,000 tokens and more; forty thousand within a few percent, the same number each time."""
    chosen, n = SPARSE[name], 4000
    rows = torch.arange(n).split(500)
    assert allowed_pairs(chosen, n, n) == sum(int(allowed(chosen, n, n, rows=part).sum()) for part in rows)
    n = 40_000
    counted = allowed_pairs(chosen, n, n)
    pair_count._count.cache_clear()
    assert counted == allowed_pairs(chosen, n, n)
    rows = torch.arange(500, n, 797)  # none of them global
    sampled = sum(int(allowed(chosen, n, n, rows=part).sum()) for part in rows.split(20))
    assert counted == pytest.approx(sampled / len(rows) * n, rel=0.1)


@pytest.mark.slow
def test_any_number_of_tokens_is_counted():
    """Within three times the stated standard error."""

    def counted(*chosen):
        return pytest.approx(allowed_pairs(chosen, n, n), rel=0.03)

    n = 10**6
    assert n * (n + 1) // 2 == counted(Causal())
    assert 101 * n - 50 * 101 == counted(Causal(), SlidingWindow(left=100))
    assert 3 * 64 * n == counted(RandomBlocks(size=64, count=3))
    n = 10**9
    assert n * (n + 1) // 2 + (n // 2) * (n // 2 - 1) // 2 == counted(PrefixLM(length=n // 2))
    assert 1000 * n == counted(Block(size=1000))
    assert 1000 * (n // 1000) ** 2 == counted(Strided(stride=1000, local=0))
    assert 1000 * n + n * 10 * (n // 1000 - 1) == counted(FixedStride(stride=1000, summary=10))
    assert 2 * (n // 4) ** 2 + (n // 2) ** 2 == counted(Documents(lengths=[n // 4, n // 4]))


@pytest.mark.slow
def test_counting_ends_with_the_request(monkeypatch):
    looks = []
    monkeypatch.setattr(pair_count, "checkpoint", lambda: looks.append(1))
    allowed_pairs([RandomBlocks(size=3, count=64), RandomBlocks(size=7, count=64, seed=5)], 10**7, 10**7)
    assert 10 < len(looks) < 1000


MOST = 2**31 - 1
LARGEST = {
    "block": [Block(size=MOST, neighbours=MOST)],
    "strided": [Strided(stride=MOST)],
    "fixed": [FixedStride(stride=MOST, summary=MOST)],
}


@pytest.mark.parametrize("chosen", [*EVERY_MASK.values(), *LARGEST.values()], ids=[*EVERY_MASK, *LARGEST])
def test_offsets_far_away_are_counted_as_they_are_computed(chosen):
    for offset in (0, 2**63 - 1, -(2**63), 2**61, -(2**61), MOST, -MOST):
        dense = allowed(chosen, 5, 7, offsets=torch.tensor(offset))
        assert dense is None or allowed_pairs(chosen, 5, 7, offset=offset) == int(dense.sum())


@settings(deadline=None)
@given(
    size=st.integers(1, 5),
    count=st.integers(1, 6),
    seed=st.integers(0, 2**31 - 1),
    keys=st.integers(0, 30),
    offset=st.integers(-(2**40), 2**40),
)
def test_random_blocks_are_those_of_the_definition_and_none_twice(size, count, seed, keys, offset):
    mask = RandomBlocks(size=size, count=count, seed=seed)
    dense = allowed([mask], 4, keys, offsets=torch.tensor(offset))[0, 0]
    blocks = -(-keys // size)
    for i, row in enumerate(dense):
        seen = {j // size for j in row.nonzero().flatten().tolist()}
        assert seen == set(draw(seed, (i + offset) // size, blocks, count))
        assert len(seen) == min(count, blocks)


def test_spans_of_keys_are_looked_up_at_once(monkeypatch):
    calls, allows = [], DrawnBlocks.allows
    monkeypatch.setattr(DrawnBlocks, "allows", lambda self, p, j: calls.append(j.shape) or allows(self, p, j))
    masks = [RandomBlocks(size=2, count=3, seed=1)]
    whole = allowed(masks, 30, 64, rows=torch.arange(4, 12))
    spans = [Span(2, 9), Span(9, 12, masked=False), Span(20, 21), Span(41, 64)]
    calls.clear()
    found = allowed(masks, 30, 64, rows=torch.arange(4, 12), spans=spans)
    assert calls == [(1, 1, 1, 31)]  # a question for each span made the costs of small blocks take half a minute
    expected = [whole[..., span.start : span.stop] | (not span.masked) for span in spans]
    assert torch.equal(found, torch.cat(expected, -1))

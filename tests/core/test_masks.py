"""Masks of positions, dense and counted, against their definitions."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cost.op_counting import count as count_operations

from attention_contract.errors import InvalidRequest
from attention_contract.spec import (
    AllOf,
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
from attention_service.core.masks import allowed, allowed_pairs

reach = st.none() | st.integers(0, 12)
leaves = (
    st.builds(Causal, align=st.sampled_from(["top_left", "bottom_right"]))
    | st.builds(SlidingWindow, left=reach, right=reach)
    | st.builds(GlobalTokens, positions=st.lists(st.integers(0, 20), min_size=1, max_size=5))
    | st.builds(PrefixLM, length=st.integers(0, 20))
    | st.builds(Block, size=st.integers(1, 7), neighbours=st.integers(0, 2))
    | st.builds(Strided, stride=st.integers(1, 6), local=reach)
    | st.builds(FixedStride, stride=st.integers(4, 7), summary=st.integers(1, 4))
    | st.builds(RandomBlocks, size=st.integers(1, 5), count=st.integers(1, 4), seed=st.integers(0, 2**31 - 1))
    | st.builds(Documents, lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4))
)


def either(of):
    return st.sampled_from([AnyOf(of=of), AllOf(of=of)])


masks = st.recursive(leaves, lambda inner: st.lists(inner, min_size=1, max_size=3).flatmap(either), max_leaves=5)


@pytest.mark.parametrize(
    ("queries", "keys", "past"), [(5, 6, 0), (6, 4, 0), (3, 9, 4), (1, 5, 4), (0, 3, 0), (3, 0, 0)]
)
@pytest.mark.parametrize("offsets", [None, 0, 2, -3, [0, 3]])
def test_dense_masks_follow_their_definition(every_mask, queries, keys, past, offsets, definition):
    given_offsets = None if offsets is None else torch.tensor(offsets)
    mask = allowed(every_mask, queries, keys, past=past, offsets=given_offsets)
    if not every_mask:
        assert mask is None
        return
    batch = len(offsets) if isinstance(offsets, list) else 1
    assert mask.shape == (batch, 1, queries, keys)
    steps = offsets if isinstance(offsets, list) else [past if offsets is None else offsets]
    surplus = keys - past - queries
    expected = [
        [
            [
                [all(definition(m, i + o, j, surplus, keys) for m in every_mask) for j in range(keys)]
                for i in range(queries)
            ]
        ]
        for o in steps
    ]
    assert mask.equal(torch.tensor(expected, dtype=torch.bool).view(mask.shape))


def test_chosen_rows_are_rows_of_the_whole(every_mask):
    if not every_mask:
        return
    rows = torch.tensor([4, 0, 4])
    whole = allowed(every_mask, 5, 7, past=1, offsets=torch.tensor([0, 2]))
    assert allowed(every_mask, 5, 7, past=1, offsets=torch.tensor([0, 2]), rows=rows).equal(whole[:, :, rows])


def test_both_alignments_agree_where_the_past_makes_up_the_difference():
    top, bottom = ([Causal(align=align)] for align in ("top_left", "bottom_right"))
    assert allowed(top, 3, 8, past=5).equal(allowed(bottom, 3, 8, past=5))
    assert not allowed(top, 3, 8).equal(allowed(bottom, 3, 8))


lengths = st.integers(0, 12) | st.integers(0, 150)


@settings(deadline=None, max_examples=300)
@given(
    chosen=st.lists(masks, max_size=3),
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


def test_a_million_tokens_are_counted_at_once():
    n, left = 1_000_000, 100
    longformer = AnyOf(of=[SlidingWindow(left=left, right=3), GlobalTokens(positions=list(range(0, n, 250)))])
    start = time.process_time()
    assert allowed_pairs([Causal()], n, n) == n * (n + 1) // 2
    assert allowed_pairs([Causal(), SlidingWindow(left=left)], n, n) == (left + 1) * n - left * (left + 1) // 2
    assert 0 < allowed_pairs([Causal(), longformer], n, n) < n * (n + 1) // 2
    assert time.process_time() - start < 1


def test_counts_larger_than_int64_are_exact():
    assert allowed_pairs([Causal()], 10**12, 10**12) == 10**12 * (10**12 + 1) // 2


@pytest.mark.parametrize(
    "mask", [SlidingWindow(left=2**31 - 1, right=2**31 - 1), GlobalTokens(positions=[0, 2**31 - 1])]
)
def test_offsets_at_the_end_of_int64_do_not_wrap(mask):
    for offset in (2**63 - 1, -(2**63)):
        dense = allowed([mask], 3, 3, offsets=torch.tensor(offset))
        assert (
            int(dense.sum())
            == allowed_pairs([mask], 3, 3, offset=offset)
            == (0 if isinstance(mask, SlidingWindow) else 3)
        )
    near = allowed([mask], 3, 3)
    assert int(near.sum()) == allowed_pairs([mask], 3, 3) == (9 if isinstance(mask, SlidingWindow) else 5)


def test_masks_can_be_shaped_without_memory(every_mask):
    mask = allowed(every_mask, 5, 7, offsets=torch.zeros(2, dtype=torch.int64, device="meta"), device="meta")
    assert mask is None or (mask.is_meta and mask.shape == (2, 1, 5, 7))


SPARSE = {
    "prefix_lm": [PrefixLM(length=33_333)],
    "block": [Block(size=512, neighbours=1), Causal()],
    "strided": [Strided(stride=316), Causal()],
    "strided far": [Strided(stride=31_623), Causal()],
    "fixed": [FixedStride(stride=128, summary=8), Causal()],
    "documents": [Documents(lengths=[20] * 4096), Causal()],
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


@pytest.mark.parametrize("chosen", SPARSE.values(), ids=SPARSE)
def test_a_hundred_thousand_tokens_are_counted_in_a_moment(chosen):
    n = 100_000
    start = time.process_time()
    counted = allowed_pairs(chosen, n, n)
    assert time.process_time() - start < 3  # a tenth of it mostly
    rows = torch.arange(500, n, 997)  # none of them global
    sampled = sum(int(allowed(chosen, n, n, rows=part).sum()) for part in rows.split(20))
    assert counted == pytest.approx(sampled / len(rows) * n, rel=0.1)


def test_what_repeats_is_counted_whatever_its_length():
    n = 10**9
    assert allowed_pairs([PrefixLM(length=n // 2)], n, n) == n * (n + 1) // 2 + (n // 2) * (n // 2 - 1) // 2
    assert allowed_pairs([Block(size=1000)], n, n) == 1000 * n
    assert allowed_pairs([Strided(stride=1000, local=0)], n, n) == 1000 * (n // 1000) ** 2
    blocks = n // 1000
    assert allowed_pairs([FixedStride(stride=1000, summary=10)], n, n) == 1000 * n + n * 10 * (blocks - 1)
    assert allowed_pairs([Documents(lengths=[n // 4, n // 4])], n, n) == 2 * (n // 4) ** 2 + (n // 2) ** 2


@pytest.mark.parametrize(
    "chosen",
    [
        [AnyOf(of=[Strided(stride=3001), Strided(stride=3002)])],
        [Strided(stride=2), GlobalTokens(positions=list(range(0, 8192, 2)))],
        [RandomBlocks(size=1, count=64)],
        [Documents(lengths=[1] * 4096), AllOf(of=[AllOf(of=[SlidingWindow(left=i) for i in range(16)])] * 16)],
    ],
)
def test_what_takes_too_long_to_count_is_refused(chosen):
    with pytest.raises(InvalidRequest, match="too long"):
        allowed_pairs(chosen, 10**7, 10**7)


@pytest.mark.parametrize("offset", [2**63 - 1, -(2**63), 2**61, -(2**61)])
def test_offsets_far_away_are_counted_as_they_are_computed(every_mask, offset):
    if every_mask:
        dense = allowed(every_mask, 5, 7, offsets=torch.tensor(offset))
        assert allowed_pairs(every_mask, 5, 7, offset=offset) == int(dense.sum())


def test_the_largest_blocks_do_not_wrap():
    most = 2**31 - 1
    for mask in (Block(size=most, neighbours=most), Strided(stride=most), FixedStride(stride=most, summary=most)):
        for offset in (0, most, -most, 2**61, -(2**61)):
            dense = allowed([mask], 3, 3, offsets=torch.tensor(offset))
            assert allowed_pairs([mask], 3, 3, offset=offset) == int(dense.sum())


@settings(deadline=None)
@given(
    size=st.integers(1, 5),
    count=st.integers(1, 6),
    seed=st.integers(0, 2**31 - 1),
    keys=st.integers(0, 30),
    offset=st.integers(-(2**40), 2**40),
)
def test_random_blocks_are_those_of_the_definition_and_none_twice(size, count, seed, keys, offset, drawn_blocks):
    mask = RandomBlocks(size=size, count=count, seed=seed)
    dense = allowed([mask], 4, keys, offsets=torch.tensor(offset))[0, 0]
    blocks = -(-keys // size)
    for i, row in enumerate(dense):
        seen = {j // size for j in row.nonzero().flatten().tolist()}
        assert seen == set(drawn_blocks(seed, (i + offset) // size, blocks, count))
        assert len(seen) == min(count, blocks)


def test_draws_are_made_by_few_operations():
    """Not one for each pair of draws, nor a matrix of pairs for each draw."""
    mask = RandomBlocks(size=1, count=64)
    _, counted = count_operations(lambda: allowed([mask], 256, 4096))
    assert counted.operations < 300
    assert counted.read + counted.written < 64 * 256 * 4096 / 2


def test_random_blocks_stay_what_they_are(drawn_blocks):
    assert [drawn_blocks(0, row, 100, 3) for row in (-1, 0, 1, 2**40)] == [
        [48, 82, 85],
        [19, 15, 42],
        [55, 71, 5],
        [67, 98, 97],
    ]
    means = torch.tensor([[float(block) for block in drawn_blocks(7, row, 64, 3)] for row in range(2000)]).mean(0)
    assert means.sub(31.5).abs().max() < 2  # of a standard deviation of 18.5 / √2000 ≈ 0.4


def test_neighbouring_documents_do_not_see_each_other_nor_what_is_before_them():
    mask = Documents(lengths=[2, 1])
    dense = allowed([mask], 6, 5, offsets=torch.tensor(-1))[0, 0].int().tolist()
    assert dense == [[0] * 5, [1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 1, 1]]


def test_a_prefix_of_nothing_is_causal_and_one_of_everything_dense():
    assert allowed([PrefixLM(length=0)], 4, 6).equal(allowed([Causal()], 4, 6))
    assert allowed([PrefixLM(length=6)], 4, 6).all()

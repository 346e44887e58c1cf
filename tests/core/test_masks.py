"""Masks of positions, dense and counted, against their definitions."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_contract.spec import AnyOf, Causal, GlobalTokens, SlidingWindow
from attention_service.core.masks import allowed, allowed_pairs

reach = st.none() | st.integers(0, 12)
leaves = (
    st.builds(Causal, align=st.sampled_from(["top_left", "bottom_right"]))
    | st.builds(SlidingWindow, left=reach, right=reach)
    | st.builds(GlobalTokens, positions=st.lists(st.integers(0, 20), min_size=1, max_size=5))
)
masks = st.recursive(leaves, lambda inner: st.builds(AnyOf, of=st.lists(inner, min_size=1, max_size=3)), max_leaves=5)


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
        [[[all(definition(m, i + o, j, surplus) for m in every_mask) for j in range(keys)] for i in range(queries)]]
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


@settings(deadline=None, max_examples=150)
@given(
    chosen=st.lists(masks, max_size=3),
    queries=st.integers(0, 12),
    new=st.integers(0, 12),
    past=st.integers(0, 6),
    offset=st.none() | st.integers(-15, 15),
)
def test_the_count_is_that_of_the_dense_mask(chosen, queries, new, past, offset):
    keys = past + new
    dense = allowed(chosen, queries, keys, past=past, offsets=None if offset is None else torch.tensor(offset))
    expected = queries * keys if dense is None else int(dense.sum())
    assert allowed_pairs(chosen, queries, keys, past=past, offset=offset) == expected


def test_a_million_tokens_are_counted_at_once():
    n, left = 1_000_000, 100
    longformer = AnyOf(of=[SlidingWindow(left=left, right=3), GlobalTokens(positions=list(range(0, n, 250)))])
    start = time.perf_counter()
    assert allowed_pairs([Causal()], n, n) == n * (n + 1) // 2
    assert allowed_pairs([Causal(), SlidingWindow(left=left)], n, n) == (left + 1) * n - left * (left + 1) // 2
    assert 0 < allowed_pairs([Causal(), longformer], n, n) < n * (n + 1) // 2
    assert time.perf_counter() - start < 1


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

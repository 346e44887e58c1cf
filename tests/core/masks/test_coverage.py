"""What a pattern says of tiles, against the dense answer for every pair of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.conftest import drawn_masks

from attention_service.core.masks.bands import Band, Keys, Queries
from attention_service.core.masks.pattern import PatternPart, Tiles
from attention_service.core.masks.random_blocks import DrawnBlocks
from attention_service.core.masks.rules import pattern_of
from attention_service.core.masks.tilings import Blocks, Leading, Remainder, Segments, Stripes

sizes = st.integers(1, 7)
limit = st.none() | st.integers(-9, 9)
positions = st.lists(st.integers(0, 20), max_size=8).map(tuple)
EXACT = {
    Band: st.builds(Band, limit, limit).filter(lambda band: None in (band.low, band.high) or band.low <= band.high),
    Queries: st.builds(Queries, positions),
    Keys: st.builds(Keys, positions),
    Leading: st.builds(Leading, st.integers(0, 20)),
    Blocks: st.builds(Blocks, sizes, st.integers(0, 2)),
    Stripes: st.builds(Stripes, sizes),
    Remainder: sizes.flatmap(lambda size: st.builds(Remainder, st.just(size), st.integers(-1, size + 1))),
    Segments: st.lists(st.integers(1, 9), max_size=4).map(
        lambda lengths: Segments((0, *torch.tensor([0, *lengths]).cumsum(0)[1:].tolist()))
    ),
    DrawnBlocks: st.builds(DrawnBlocks, sizes, st.integers(0, 4), st.integers(0, 2**31 - 1), st.integers(0, 9)),
}
cuts = st.sets(st.integers(1, 20), max_size=8)
offsets = st.integers(-12, 30)


def compare(pattern, query_cuts, key_cuts, offset, *, exact):
    """The coverage of every tile between the cuts of 21 queries and keys, and whether that is what the pairs say."""
    p_edges, j_edges = (torch.tensor(sorted({0, 21, *some})) for some in (query_cuts, key_cuts))
    p, j = torch.arange(21)[:, None] + offset, torch.arange(21)[None]
    tiles = Tiles(
        p_edges[:-1, None] + offset, p_edges[1:, None] - 1 + offset, j_edges[None, :-1], j_edges[None, 1:] - 1
    )
    coverage = pattern.coverage(tiles)
    shape = len(p_edges) - 1, len(j_edges) - 1
    some, every = coverage.some.expand(shape), coverage.every.expand(shape)
    dense = pattern.allows(p, j).expand(21, 21)
    for row in range(shape[0]):
        for column in range(shape[1]):
            pairs = dense[p_edges[row] : p_edges[row + 1], j_edges[column] : j_edges[column + 1]]
            assert bool(some[row, column]) >= bool(pairs.any())
            assert bool(every[row, column]) <= bool(pairs.all())
            if exact:
                assert bool(some[row, column]) == bool(pairs.any())
                assert bool(every[row, column]) == bool(pairs.all())


def test_every_part_is_drawn_here():
    assert set(EXACT) == set(PatternPart.__subclasses__())


@pytest.mark.sampled(part=4)
@pytest.mark.parametrize("part", EXACT, ids=lambda part: part.__name__)
@settings(deadline=None, max_examples=60)
@given(data=st.data(), query_cuts=cuts, key_cuts=cuts, offset=offsets)
def test_a_part_is_exact(part, data, query_cuts, key_cuts, offset):
    compare(data.draw(EXACT[part]), query_cuts, key_cuts, offset, exact=True)


@settings(deadline=None, max_examples=150)
@given(chosen=st.lists(drawn_masks(), max_size=3), query_cuts=cuts, key_cuts=cuts, offset=offsets)
def test_no_allowed_pair_is_left_out_and_no_forbidden_one_let_in(chosen, query_cuts, key_cuts, offset):
    compare(pattern_of(chosen, 21, 21), query_cuts, key_cuts, offset, exact=False)


def test_more_blocks_than_are_worth_drawing_are_left_open():
    pattern = DrawnBlocks(size=1, count=4, seed=0, blocks=2000)
    tiles = Tiles(*(torch.tensor([[end]]) for end in (0, 999, 0, 9)))
    coverage = pattern.coverage(tiles)
    assert bool(coverage.some)
    assert not bool(coverage.every)

"""The tiles of the blocked kernel that may hold most, found from positions before anything is computed."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import ge
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from attention_service.core.bands import Band
from attention_service.core.extent import Extent
from attention_service.core.kernels.hiding import KEPT, Likeness
from attention_service.core.kernels.tiling import Block, Layout, Piece, Strip, Tiling
from attention_service.core.kernels.touched import sequences, tiling_of, touched, whole_rows
from attention_service.core.masks import FAR, pattern_of

_MOST_BLOCKS = 24
"""Beyond so many, some of them stand for all: the first and the last, the widest and others between."""
_FEW = 4
_LOOKED_AT = 2**15
"""Cells of all blocks: beyond so many, the widest are not looked for."""
_MOST_FIRSTS = 8
"""The same of places at which sequences stand."""
MOST_CELLS = 1024
"""Cells of a block. A larger block's tiles are bounded, not enumerated."""


class Tile(NamedTuple):
    """The facts on which a tile's memory depends; it grows with each of them."""

    queries: int
    keys: int
    spans: int
    """Stretches of keys that do not touch: of more than one, keys and values are put together."""
    follows: bool
    """True if an earlier tile of the same queries left its sums."""
    remembered: int
    """Pairs whose limits are there from tiles before."""
    limits: int
    """Pairs whose limits are there once this one is hidden."""
    passing: int
    """Pairs of the largest piece whose limits are laid out for it and not remembered."""
    fresh: int
    """Pairs of the largest piece whose limits are laid out for it."""
    masked: bool
    """True if some of its pairs are hidden."""


class Found(NamedTuple):
    """A tile, and where it is."""

    tile: Tile
    first: int
    """Position of the first query."""
    block: Block
    """A block of this tile and the one before it alone."""


def largest_tiles(sizes: Extent) -> tuple[int, tuple[Found, ...]]:
    """Return the number of sequences looked at together, and the Pareto-maximal tiles."""
    fitted, rows_whole = tiling_of(sizes), whole_rows(sizes)
    at_once = min(sizes.batch, sequences(sizes, fitted))
    keys = sizes.met_keys
    if not sizes.spec.masks:
        return at_once, _dense(sizes, keys + sizes.extra, fitted, rows_whole=rows_whole)
    if keys > MOST_CELLS * fitted.cell:
        return at_once, _bounded(sizes, fitted, rows_whole=rows_whole)
    pattern = pattern_of(sizes.spec.masks, sizes.queries, sizes.told_keys, sizes.past)
    layout = Layout(pattern, sizes.past, sizes.queries, keys, sizes.extra)
    firsts = [sizes.past] * min(2, -(-sizes.batch // max(at_once, 1)))
    if sizes.batched_offsets:  # where they are not known, each is another
        places = sizes.offsets or range(sizes.past, sizes.past + min(sizes.batch, _MOST_FIRSTS))
        firsts = [max(-FAR, min(offset, FAR)) for offset in places]
    return at_once, _tiles(layout, _seldom(firsts), fitted, rows_whole=rows_whole)


def _dense(sizes: Extent, all_keys: int, tiling: Tiling, *, rows_whole: bool) -> tuple[Found, ...]:
    """Every block looks at every one of these keys."""
    queries, keys = min(tiling.queries, sizes.queries), all_keys
    if rows_whole:
        queries = min(queries, max(1, tiling.scores // max(1, keys)))
    else:
        keys = min(keys, tiling.keys)
    strips = [Strip((Piece(0, keys, masked=False),))] if keys else []
    follows = min(keys, all_keys - keys)
    if follows:
        strips.append(Strip((Piece(keys, keys + follows, masked=False),)))
    tile = Tile(queries, keys, 1, follows > 0, 0, 0, 0, 0, masked=False)
    return (Found(tile, sizes.past, Block(0, queries, tuple(strips))),)


def _bounded(sizes: Extent, tiling: Tiling, *, rows_whole: bool) -> tuple[Found, ...]:
    """One as large as any can be, where there are too many to go through."""
    seen = touched(sizes)
    ((dense, *_),) = _dense(sizes, seen.widest, tiling, rows_whole=rows_whole)
    # Along each edge a piece as wide as the block and a cell more; those of one edge all look the same.
    piece = min(dense.queries * dense.keys, dense.queries * (dense.queries + tiling.cell))
    pattern = pattern_of(sizes.spec.masks, sizes.queries, sizes.told_keys, sizes.past)
    bands = [part for part in pattern.parts() if isinstance(part, Band)]
    edges = sum((band.low is not None) + (band.high is not None) for band in bands)
    limits = min(KEPT * tiling.largest, max(edges, 1) * piece)
    spans, follows = 2 if pattern.bounds.strips else 1, seen.strips > seen.blocks
    tile = Tile(dense.queries, dense.keys, spans, follows, limits, limits, 0, piece, masked=True)
    edge = piece // max(dense.queries, 1)
    pieces = [Piece(0, edge, masked=True)]
    if dense.keys > edge:
        apart = edge + (spans > 1)
        pieces.append(Piece(apart, min(apart + dense.keys - edge, sizes.keys), masked=False))
    return (Found(tile, sizes.past, Block(0, dense.queries, (Strip(tuple(pieces)),) * (1 + follows))),)


def _seldom(firsts: Sequence[int]) -> tuple[int, ...]:
    """Keep two of equal positions, because the second reuses the first's limits, and a few of many, with both ends."""
    few = sorted({*firsts})
    if len(few) > _MOST_FIRSTS:
        few = [few[index * (len(few) - 1) // (_MOST_FIRSTS - 1)] for index in range(_MOST_FIRSTS)]
    return tuple(first for first in few for _ in range(min(2, firsts.count(first))))


@lru_cache(maxsize=64)
def _tiles(layout: Layout, firsts: tuple[int, ...], tiling: Tiling, *, rows_whole: bool) -> tuple[Found, ...]:
    likeness = Likeness(layout.pattern, tiling.largest)
    found: dict[Tile, Found] = {}
    starts = range(0, layout.queries, tiling.queries)
    for index, first in enumerate(firsts):
        here = replace(layout, first=first)
        again = index > 0 and first == firsts[index - 1]
        chosen, kinds = _some(here, tiling, starts[:_FEW] if again else starts)
        for start, pieces in zip(chosen, here.pieces(kinds, tiling.cell), strict=True):
            stop = min(start + tiling.queries, layout.queries)
            for block in here.cut(pieces, start, stop, tiling, whole_rows=rows_whole):
                found |= {each.tile: each for each in _of_block(block, first, likeness)}
    return tuple(found[tile] for tile in _undominated({*found}))


def _some(layout: Layout, tiling: Tiling, starts: range) -> tuple[list[int], NDArray[np.int8]]:
    """The first queries of no more blocks than there is time for, and what is known of their cells."""
    chosen = [*range(len(starts))]
    whole = len(starts) * -(-layout.keys // tiling.cell) <= _LOOKED_AT
    kinds = _kinds(layout, tiling, starts) if whole else None
    if len(starts) > _MOST_BLOCKS:
        between = [index * len(starts) // _FEW for index in range(_FEW)]
        widest = [] if kinds is None else np.argsort(-(kinds > 0).sum(1), kind="stable")[:_FEW].tolist()
        chosen = sorted({*chosen[:_FEW], *chosen[-_FEW:], *between, *widest})
    if kinds is None:
        return [starts[index] for index in chosen], _kinds(layout, tiling, [starts[index] for index in chosen])
    return [starts[index] for index in chosen], kinds[chosen]


def _kinds(layout: Layout, tiling: Tiling, starts: Sequence[int]) -> NDArray[np.int8]:
    return layout.kinds_of(tiling, torch.tensor([*starts], dtype=torch.int64), layout.queries)


def _of_block(block: Block, first: int, likeness: Likeness) -> Iterator[Found]:
    queries = block.stop - block.start
    rows = block.start + first, block.stop + first
    for index, strip in enumerate(block.strips):
        before, fresh, passing = likeness.held, 0, 0
        for piece in strip.pieces:
            if piece.masked:
                key, new, _ = likeness.remember(rows, (piece.start, piece.stop))
                size = queries * (piece.stop - piece.start)
                fresh = max(fresh, size if new else 0)
                passing = max(passing, size if key is None else 0)
        masked = any(piece.masked for piece in strip.pieces)
        tile = Tile(queries, strip.width, len(strip.spans), index > 0, before, likeness.held, passing, fresh, masked)
        yield Found(tile, first, replace(block, strips=block.strips[max(index - 1, 0) : index + 1]))
    if not block.strips:
        yield Found(Tile(queries, 0, 0, False, likeness.held, likeness.held, 0, 0, masked=False), first, block)


def _undominated(found: set[Tile]) -> list[Tile]:
    """Keep the tiles that no other one exceeds in everything."""
    kept: list[Tile] = []
    for tile in sorted(found, reverse=True):
        if not any(all(map(ge, other, tile)) for other in kept):
            kept.append(tile)
    return kept

"""How much of each kind of tile the blocked kernel goes through, counted without going through them."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention_service.core.kernels.hiding import Likeness
from attention_service.core.kernels.tiling import Layout, Tiling
from attention_service.core.masks import pattern_of

Cells = NDArray[Any]
_NONE, _SOME, _EVERY = 0, 1, 2
_MOST_CELLS = 2**18
"""Beyond so many the tiles are not looked at one by one: those of a few blocks stand for all."""
_SAMPLES = 16


@dataclass(frozen=True)
class Strips:
    """Of all blocks with as many queries, for one group of sequences. Where it was sampled, numbers are averages."""

    rows: int
    """Queries of a block."""
    blocks: float = 0
    looking: float = 0
    """Blocks that look at any key."""
    strips: float = 0
    width: float = 0
    """Σ over the strips of their keys."""
    spans: float = 0
    """Stretches of keys side by side, over all strips."""
    joined: float = 0
    """Strips of more than one such stretch, whose keys are put together first."""
    joined_width: float = 0
    masked: float = 0
    """Pieces in which the masks of positions hide something."""
    masked_width: float = 0
    fresh: float = 0
    """Those of them that look like none before, for which the limits are laid out."""
    fresh_width: float = 0
    fresh_again: float = 0
    """The same for a second group of sequences, which finds what is still remembered."""
    fresh_again_width: float = 0
    hiding: float = 0
    """Blocks with a masked piece, and all keys that those look at."""
    hiding_width: float = 0

    def __add__(self, other: "Strips") -> "Strips":
        names = [name for name in self.__dataclass_fields__ if name != "rows"]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})

    def times(self, factor: float) -> "Strips":
        """All of it so many times."""
        names = [name for name in self.__dataclass_fields__ if name != "rows"]
        return replace(self, **{name: getattr(self, name) * factor for name in names})


def few_cells(layout: Layout, tiling: Tiling) -> bool:
    """Whether tiles are looked at one by one."""
    return -(-layout.queries // tiling.queries) * -(-max(layout.keys, 1) // tiling.cell) <= _MOST_CELLS


@lru_cache(maxsize=64)
def strips_of(layout: Layout, tiling: Tiling, *, rows_whole: bool) -> tuple[Strips, ...]:
    """By the number of queries of a block."""
    if not layout.queries:
        return ()
    if layout.pattern == pattern_of((), layout.queries, layout.keys):
        return _dense(layout, tiling, rows_whole=rows_whole)
    if few_cells(layout, tiling):
        return _counted(layout, tiling, rows_whole=rows_whole)
    return _sampled(layout, tiling, rows_whole=rows_whole)


def _dense(layout: Layout, tiling: Tiling, *, rows_whole: bool) -> tuple[Strips, ...]:
    """Nothing hidden: every block looks at every key."""
    width = layout.keys + layout.extra
    full, rest = divmod(layout.queries, tiling.queries)
    strips = int(width > 0) if rows_whole else -(-width // tiling.keys)
    found: dict[int, Strips] = {}
    for rows, blocks in ((tiling.queries, full), (rest, int(rest > 0))):
        for _, _, count in _parts(rows, tiling, np.array([width]) if rows_whole else None):
            one = Strips(count, 1, int(width > 0), strips, width, strips).times(blocks)
            found[count] = found[count] + one if count in found else one
    return tuple(one for one in found.values() if one.blocks)


def _counted(layout: Layout, tiling: Tiling, *, rows_whole: bool, strip: int | None = None) -> tuple[Strips, ...]:
    """All blocks at once, by cells; ``strip``: the keys of one, where cells are coarser than those of the tiling."""
    kinds = layout.kinds(tiling, 0, layout.queries)
    cells = np.full(kinds.shape[1], tiling.cell)
    cells[-1:] = layout.keys - tiling.cell * (len(cells) - 1)
    if layout.extra:  # what the spec adds stands after the last key, in sight of all
        kinds = np.pad(kinds, ((0, 0), (0, 1)), constant_values=_EVERY)
        cells = np.append(cells, layout.extra)
    seen = np.where(kinds != _NONE, cells, 0)
    column = seen.cumsum(1) - seen
    width = seen.sum(1)  # [blocks]
    keys = max(1, int(width.max(initial=1))) if rows_whole else strip or tiling.keys
    number = column // keys  # in which strip a cell is
    together = np.zeros_like(kinds, dtype=bool)  # with the cell before it
    together[:, 1:] = (kinds[:, 1:] != _NONE) & (kinds[:, :-1] != _NONE) & (number[:, 1:] == number[:, :-1])
    begins = (kinds != _NONE) & ~together
    strips = -(-width // keys)
    spans, joined, joined_width = _spans(begins, number, strips, width, keys)
    pieces = _pieces(kinds, together, seen, tiling.cell)
    parts = _parts(layout.queries, tiling, width if rows_whole else None)
    fresh = _fresh(layout, tiling, pieces, parts)
    hidden = {block: sum(stop - start for start, stop in own) for block, own in pieces.items()}
    of_block = np.stack(
        [
            np.ones_like(width), width > 0, strips, width, spans, joined, joined_width,
            [len(pieces.get(block, ())) for block in range(len(width))],
            [hidden.get(block, 0) for block in range(len(width))],
        ]
    )  # fmt: skip
    blocks, rows = np.array([part[0] for part in parts]), np.array([part[2] for part in parts])
    partly = of_block[-1, blocks] > 0
    every = np.concatenate([of_block[:, blocks], fresh, [partly, partly * width[blocks]]])
    return tuple(Strips(size, *every[:, rows == size].sum(1).tolist()) for size in np.unique(rows).tolist())


def _fresh(
    layout: Layout, tiling: Tiling, pieces: dict[int, list[tuple[int, int]]], parts: list[tuple[int, int, int]]
) -> Cells:
    """``[4, parts]``: pieces that look like none before, and their keys; and of a second group of sequences."""
    likeness = Likeness(layout.pattern, tiling.largest)
    counts = np.zeros((4, len(parts)), dtype=np.int64)
    for again in (0, 2):
        for index, (block, start, size) in enumerate(parts):
            queries = start + layout.first, start + size + layout.first
            for first, stop in pieces.get(block, ()):
                _, new, _ = likeness.remember(queries, (first, stop))
                counts[again : again + 2, index] += new * np.array([1, stop - first])
    return counts


def _spans(begins: Cells, number: Cells, strips: Cells, width: Cells, keys: int) -> tuple[Cells, Cells, Cells]:
    """By block: stretches of keys side by side, strips of more than one of them, and the keys of those."""
    blocks, most = len(begins), int(strips.max(initial=0)) or 1
    block, cell = np.nonzero(begins)
    count = np.bincount(block * most + number[block, cell], minlength=blocks * most).reshape(blocks, most)
    several = count > 1
    ends = np.minimum(np.arange(1, most + 1) * keys, width[:, None])
    keys_of = ends - np.minimum(np.arange(most) * keys, width[:, None])
    return count.sum(1), several.sum(1), (keys_of * several).sum(1)


def _pieces(kinds: Cells, together: Cells, seen: Cells, cell: int) -> dict[int, list[tuple[int, int]]]:
    """By block: first key and end of each stretch in which the masks of positions hide something."""
    some = kinds == _SOME
    first = some.copy()
    first[:, 1:] &= ~(some[:, :-1] & together[:, 1:])
    block, at = np.nonzero(some)
    if not len(block):
        return {}
    each = first[block, at].cumsum() - 1
    widths = np.bincount(each, weights=seen[block, at]).astype(int)
    begin_block, begin = np.nonzero(first)
    found: dict[int, list[tuple[int, int]]] = {}
    for own, start, size in zip(begin_block.tolist(), (begin * cell).tolist(), widths.tolist(), strict=True):
        found.setdefault(own, []).append((start, start + size))
    return found


def _parts(queries: int, tiling: Tiling, width: Cells | None) -> list[tuple[int, int, int]]:
    """The block, first query and queries of each part; more than one part of a block where whole rows are wanted.

    ``width``: the keys of each block's rows, of which no more are held than scores may be; None where rows are cut.
    """
    found = []
    for block, start in enumerate(range(0, queries, tiling.queries)):
        stop = min(start + tiling.queries, queries)
        at_once = tiling.queries if width is None else max(1, tiling.scores // max(1, int(width[block])))
        found += [(block, first, min(at_once, stop - first)) for first in range(start, stop, at_once)]
    return found


def _sampled(layout: Layout, tiling: Tiling, *, rows_whole: bool) -> tuple[Strips, ...]:
    """A few blocks, spread over the queries, stand for all; cells are as large as not to be too many."""
    blocks = -(-layout.queries // tiling.queries)
    cell = max(tiling.cell, -(-layout.keys // (_MOST_CELLS // 4 // _SAMPLES)))
    coarse = replace(tiling, cell=cell)
    starts = sorted({(2 * index + 1) * blocks // (2 * _SAMPLES) * tiling.queries for index in range(_SAMPLES)})
    found: dict[int, Strips] = {}
    for start in starts:
        queries = min(tiling.queries, layout.queries - start)
        part = replace(layout, first=layout.first + start, queries=queries)
        for one in _counted(part, coarse, rows_whole=rows_whole, strip=tiling.keys):
            found[one.rows] = found[one.rows] + one if one.rows in found else one
    return tuple(one.times(blocks / len(starts)) for one in found.values())

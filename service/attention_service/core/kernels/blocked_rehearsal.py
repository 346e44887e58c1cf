"""The blocked kernel on meta tensors: one tile, as large as any that the masks leave.

A tile along the edge of a band hides a piece as wide as the block of queries and one cell more; a tile of another mask
may hide pairs anywhere.
"""

from collections.abc import Iterator

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from attention_service.core.kernels.extent import Extent
from attention_service.core.kernels.hiding import KEPT, Limits
from attention_service.core.kernels.tiles import Group, scored_in
from attention_service.core.kernels.tiling import Block, Piece, Strip, Tiling
from attention_service.core.kernels.touched import Touched, sequences, tiling_of, touched_at, whole_rows
from attention_service.core.masks.combinations import AnyOf
from attention_service.core.masks.pattern import Pattern
from attention_service.core.masks.rules import MAX_POSITION, pattern_of
from attention_service.core.problem import Problem


class LargestTile:
    """The block with the largest tile, in place of all blocks."""

    def __init__(self, sizes: Extent) -> None:
        self._sizes = sizes

    def __call__(self, problem: Problem, *, whole_rows: bool) -> Iterator[tuple[Group, Block]]:
        """Yield the block once, in a group of as many sequences as are looked at together."""
        sizes, fitted = self._sizes, tiling_of(self._sizes)
        if not sizes.batch * sizes.queries * sizes.keys:
            return
        with _disable_current_modes():  # tiles are found by real numbers
            block, remembered = largest_tile(sizes)
        together = min(sizes.batch, sequences(sizes, fitted))
        pattern = pattern_of(problem.spec.masks, problem.q.shape[2], problem.keys, problem.past)
        limits = _Remembered(pattern, problem, remembered)
        yield Group(problem, slice(0, together), sizes.past, limits, pattern), block


def largest_tile(sizes: Extent) -> tuple[Block, int]:
    """Return a block whose last tile is as large as any, and the pairs whose limits earlier tiles left."""
    fitted, masked = tiling_of(sizes), bool(sizes.spec.masks)
    seen = _widest(sizes)
    all_keys = seen.widest if masked else sizes.unpadded_keys + sizes.added_keys
    queries, keys = _extent(sizes, fitted, all_keys)
    follows = seen.strips > seen.blocks if masked else keys < all_keys
    dense = Strip((Piece(0, keys, masked=False),))
    if not keys:
        return Block(0, queries, ()), 0
    if not masked:
        rest = min(keys, all_keys - keys)
        return Block(0, queries, (dense, Strip((Piece(keys, keys + rest, masked=False),)))[: 1 + follows]), 0
    pattern = pattern_of(sizes.spec.masks, sizes.queries, sizes.sequence_keys, sizes.past)
    edge, remembered = _hidden(sizes, pattern, seen, queries, keys)
    gap = int(bool(pattern.bounds.strips) or isinstance(pattern, AnyOf))  # then keys are put together
    if gap and edge == keys:
        edge -= 1
    pieces = [Piece(0, edge, masked=True)] if edge else []
    start = min(edge + gap, sizes.keys - 1)
    if keys > edge:
        pieces.append(Piece(start, min(start + keys - edge, sizes.keys), masked=not edge))
    return Block(0, queries, (dense,) * follows + (Strip(tuple(pieces)),)), remembered


def _widest(sizes: Extent) -> Touched:
    """Count the tiles at the place where a block looks at the most keys: the first, the last or one between."""
    places = [sizes.past]
    if sizes.batched_offsets and sizes.spec.masks:
        told = sorted(sizes.offsets or range(sizes.past, sizes.past + sizes.batch))
        places = [max(-MAX_POSITION, min(told[index], MAX_POSITION)) for index in (0, len(told) // 2, -1)]
    return max((touched_at(sizes, place) for place in places), key=lambda each: each.widest)


def _extent(sizes: Extent, tiling: Tiling, all_keys: int) -> tuple[int, int]:
    """Queries and keys of a tile of a block that looks at so many keys."""
    queries = min(tiling.queries, sizes.queries)
    if whole_rows(sizes):
        return min(queries, max(1, tiling.scores // max(1, all_keys))), all_keys
    return queries, min(all_keys, tiling.keys)


def _hidden(sizes: Extent, pattern: Pattern, seen: Touched, queries: int, keys: int) -> tuple[int, int]:
    """Return the keys of the largest piece that the masks partly hide, and the remembered pairs beside it."""
    tiling, turns = tiling_of(sizes), [part.turns for part in pattern.parts()]
    if any(each.period is None for each in turns):  # no tile is remembered
        return keys, 0
    repeated = any(each.period != 1 for each in turns)
    passing = any(each.still or each.rows for each in turns)  # such a tile is not remembered
    along = min(keys, queries + tiling.cell)
    edge = keys if passing or repeated else along
    # Along each edge tiles look alike, but for the first and the last blocks and for sequences at other places.
    edges = sum(len(each.moving) for each in turns if each.period == 1)
    alike = edges * min(2 * (sizes.batch if sizes.batched_offsets else 1), seen.blocks)
    pairs = queries * (alike * along + seen.strips * edge * repeated)
    if whole_rows(sizes) and queries < min(tiling.queries, sizes.queries):  # blocks of fewer keys have more queries
        pairs = KEPT * tiling.largest
    return edge, max(0, min(KEPT * tiling.largest, pairs) - (0 if passing else queries * edge))


class _Remembered(Limits):
    """The limits of a tile, remembered beside those that earlier tiles left."""

    def __init__(self, pattern: Pattern, problem: Problem, left: int) -> None:
        super().__init__(pattern, scored_in(problem), problem.q.device, 0)
        self._left = problem.q.new_empty(left, dtype=scored_in(problem))
        self._kept: list[Tensor] = []

    def of(self, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        """``[queries, keys]``."""
        self._kept.append(self._laid_out(queries, keys))
        return self._kept[-1]

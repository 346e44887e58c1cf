"""The keys that each block of queries looks at, found from positions alone before anything is computed.

Queries are cut into blocks, keys into small cells. Of each cell the masks of positions say whether a block of queries
may look at none, some or all of it. Cells side by side that are alike make a piece; pieces make strips, each as many
keys as are worth a matrix product.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention_service.core.masks.pattern import Pattern, Tiles

_CELLS_AT_ONCE = 2**18
_NONE, _SOME = 0, 1  # and 2 for every


@dataclass(frozen=True)
class Tiling:
    """Sizes of blocks, strips and cells."""

    queries: int = 256
    """Queries of a block, at most."""
    keys: int = 1024
    """Keys of a strip, at most; more where the blocks have fewer queries than this asks for."""
    cell: int = 64
    scores: int = 2**20
    """Scores held at a time, over the sequences and heads that are computed together."""

    def fitted(self, heads: int, queries: int, keys: int) -> "Tiling":
        """For each of so many heads: blocks and strips of one sequence that hold no more scores than they may."""
        scores = self.scores // max(1, heads)
        rows = max(1, min(self.queries, queries))
        while rows > 32 and rows * min(self.keys, keys) > scores:
            rows //= 2
        columns = min(scores // rows, self.keys * self.queries // rows) // self.cell * self.cell
        return Tiling(rows, max(columns, self.cell), self.cell, scores)

    def whole(self, queries: int) -> "Tiling":
        """For blocks of so many queries at most, whose keys are all looked at together."""
        return replace(self, queries=max(1, min(self.queries, queries)))

    def sequences(self, keys: int) -> int:
        """Return the number of sequences to compute together."""
        return max(1, self.scores // max(1, self.queries * min(self.keys, keys)))

    @property
    def largest(self) -> int:
        """The most queries times keys of a tile."""
        return min(self.queries * self.keys, self.scores)


TILING = Tiling()
WHOLE = Tiling(queries=256, keys=2**62, scores=2**21)
"""The tiling of blocks that PyTorch's fused kernel computes: one strip has all keys.

From 192 queries on, that kernel takes 64 at a time, which two or four threads share evenly. Of larger blocks, a window
leaves each query a smaller share of the keys.
"""


@dataclass(frozen=True)
class Piece:
    """Keys side by side."""

    start: int
    stop: int
    masked: bool
    """True if positional masks hide some of the pairs."""


@dataclass(frozen=True)
class Strip:
    """The keys of one tile, in ascending order."""

    pieces: tuple[Piece, ...]

    @property
    def width(self) -> int:
        """The number of keys."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Its pieces, joined where they touch."""
        joined: list[tuple[int, int]] = []
        for piece in self.pieces:
            if joined and joined[-1][1] == piece.start:
                joined[-1] = joined[-1][0], piece.stop
            else:
                joined.append((piece.start, piece.stop))
        return joined


@dataclass(frozen=True)
class Block:
    """Queries from start to before stop, and the keys that they look at."""

    start: int
    stop: int
    strips: tuple[Strip, ...]


@dataclass(frozen=True)
class Layout:
    """Queries at positions first, first + 1, … against keys 0, 1, …, and what the masks of positions say of them."""

    pattern: Pattern
    first: int
    queries: int
    keys: int
    extra: int = 0
    """Number of added keys at the end, which no mask hides."""
    real: Tensor | None = None
    """Bool ``[keys]``: which keys are real in any of the sequences."""

    def blocks(self, tiling: Tiling, *, whole_rows: bool) -> Iterator[Block]:
        """All queries, block by block. ``whole_rows`` puts all keys of a block into one strip, and cuts the block."""
        for start, stop in self._chunks(tiling):
            every = self.pieces(self.kinds(tiling, start, stop), tiling.cell)
            for pieces, begin in zip(every, range(start, stop, tiling.queries), strict=True):
                yield from self.cut(pieces, begin, min(begin + tiling.queries, stop), tiling, whole_rows=whole_rows)

    def cut(
        self, pieces: Sequence[Piece], start: int, stop: int, tiling: Tiling, *, whole_rows: bool
    ) -> Iterator[Block]:
        """Queries from start to before stop, and the pieces that they look at: one block, or its parts."""
        if not whole_rows:
            yield Block(start, stop, tuple(_strips(pieces, tiling.keys)))
            return
        strips = (Strip(tuple(pieces)),) if pieces else ()
        rows = max(1, tiling.scores // max(1, sum(strip.width for strip in strips)))
        for part in range(start, stop, rows):
            yield Block(part, min(part + rows, stop), strips)

    def widths(self, tiling: Tiling) -> NDArray[np.int64]:
        """``[blocks]``: at how many keys each block of queries looks."""
        missing = -self.keys % tiling.cell  # of the last cell
        each = [np.zeros(0, dtype=np.int64)]
        for chunk in self._chunks(tiling):
            looked_at = self.kinds(tiling, *chunk) != _NONE
            each.append(tiling.cell * looked_at.sum(1) - missing * looked_at[:, -1:].sum(1))
        return np.concatenate(each) + self.extra

    def kinds(self, tiling: Tiling, start: int, stop: int) -> NDArray[np.int8]:
        """``[blocks, cells]``: whether the queries of each block may look at none, some or every key of a cell."""
        return self.kinds_of(tiling, torch.arange(start, stop, tiling.queries), stop)

    def kinds_of(self, tiling: Tiling, first: Tensor, stop: int) -> NDArray[np.int8]:
        """The same of the blocks that begin at these queries ``[blocks]``; none goes beyond ``stop``."""
        j_first = torch.arange(0, self.keys, tiling.cell)
        tiles = Tiles(
            p_first=first[:, None] + self.first,
            p_last=(first + tiling.queries).clamp(max=stop)[:, None] - 1 + self.first,
            j_first=j_first[None],
            j_last=(j_first + tiling.cell).clamp(max=self.keys)[None] - 1,
        )
        coverage = self.pattern.coverage(tiles)
        kinds = (coverage.some.to(torch.int8) + (coverage.some & coverage.every)).expand(len(first), len(j_first))
        if self.real is not None:
            missing = len(j_first) * tiling.cell - self.keys
            cells = torch.nn.functional.pad(self.real, (0, missing)).view(-1, tiling.cell)
            kinds = kinds * cells.any(1)
        return kinds.numpy()

    def _chunks(self, tiling: Tiling) -> Iterator[tuple[int, int]]:
        """Queries of as many whole blocks as are looked at together."""
        at_once = max(1, _CELLS_AT_ONCE // max(1, -(-self.keys // tiling.cell))) * tiling.queries
        for start in range(0, self.queries, at_once):
            yield start, min(start + at_once, self.queries)

    def pieces(self, kinds: NDArray[np.int8], cell: int) -> Iterator[list[Piece]]:
        """Return the pieces of each block, from its ``kinds`` ``[blocks, cells]``."""
        blocks, cells = kinds.shape
        block, before = np.nonzero(kinds[:, 1:] != kinds[:, :-1])
        ends = np.searchsorted(block, np.arange(blocks + 1)).tolist()
        turns = (before + 1).tolist()
        for row, (start, stop) in zip(kinds, pairwise(ends), strict=True):
            edges = [0, *turns[start:stop], cells] if cells else []
            found = [
                Piece(left * cell, min(right * cell, self.keys), bool(row[left] == _SOME))
                for left, right in pairwise(edges)
                if row[left] != _NONE
            ]
            if self.extra:
                found.append(Piece(self.keys, self.keys + self.extra, masked=False))
            yield found


def _strips(pieces: Sequence[Piece], keys: int) -> Iterator[Strip]:
    """The pieces, cut and put together to strips of as many keys, the last one of fewer."""
    gathered: list[Piece] = []
    room = keys
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            stop = min(piece.stop, start + room)
            gathered.append(Piece(start, stop, piece.masked))
            room -= stop - start
            start = stop
            if not room:
                yield Strip(tuple(gathered))
                gathered, room = [], keys
    if gathered:
        yield Strip(tuple(gathered))

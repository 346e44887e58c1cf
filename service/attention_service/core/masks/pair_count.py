"""The number of pairs that masks allow.

The pairs are cut into tiles. A tile whose pairs are all allowed or all forbidden is counted at once, and any other is
cut into smaller ones; the smallest are laid out. If there are very many pairs, only a sample of the tiles is cut
further. It is drawn with a fixed seed.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from attention_contract import spec
from attention_service.core.cancellation import checkpoint
from attention_service.core.masks.operation_count import CHEAP, mask_cost
from attention_service.core.masks.pattern import Pattern, Tiles
from attention_service.core.masks.rules import MAX_POSITION, pattern_of

_LAID_OUT, _ROWS = 2**12, 64
"""Pairs of the smallest tiles, and their queries where there are as many."""
_BRANCHES = 8
"""Parts into which the sides of a tile are cut."""
_AT_ONCE = 2**8
"""Tiles that are cut or laid out together."""
_EXACT = 2**28
"""Pairs up to which every tile is counted, unless the masks have many parts or draws."""
_SAMPLE, _LEAST = 2**13, 2**10
"""Tiles of each size in a sample, and of masks with many parts or draws."""


def allowed_pairs(
    masks: Sequence[spec.Mask], queries: int, keys: int, *, past: int = 0, offset: int | None = None
) -> int:
    """Count the queries × keys pairs that all masks allow.

    The count is exact up to 16,384 × 16,384 pairs, or fewer if the masks have many parts or random draws. Beyond, it is
    estimated from a sample, with a relative standard error of about 1 %.
    """
    if not queries or not keys:
        return 0
    first = max(-MAX_POSITION, min(past if offset is None else offset, MAX_POSITION))
    cost = max(1.0, mask_cost(masks) / CHEAP)
    sample = None if queries * keys * cost <= _EXACT else max(_LEAST, int(_SAMPLE / cost**2))
    return _count(pattern_of(masks, queries, keys, past), first, queries, keys, sample)


@lru_cache(maxsize=32)  # one account of costs asks for the same count several times
def _count(pattern: Pattern, first: int, queries: int, keys: int, sample: int | None) -> int:
    rows = min(_ROWS, 1 << (queries - 1).bit_length())
    columns = _LAID_OUT // rows
    scale = 1
    while rows * scale < queries or columns * scale < keys:
        scale *= _BRANCHES
    sized = _Sized(pattern, first, queries, keys)
    generator = torch.Generator().manual_seed(0)
    total, weight = Fraction(0), Fraction(1)
    tiles = torch.zeros(1, 2, dtype=torch.int64)  # [N, 2]: the row and the column of each tile
    while scale > 1 and len(tiles):
        scale //= _BRANCHES
        parts = [sized.cut(some, rows * scale, columns * scale) for some in torch.split(tiles, _AT_ONCE)]
        total += weight * sum(whole for whole, _ in parts)
        tiles = torch.cat([partial for _, partial in parts])
        if sample is not None and len(tiles) > sample:
            weight *= Fraction(len(tiles), sample)
            tiles = _drawn(tiles, sample, rows, columns, generator)
    laid_out = [sized.lay_out(some, rows, columns) for some in torch.split(tiles, _AT_ONCE)]
    return round(total + weight * sum(laid_out))


def _drawn(tiles: Tensor, count: int, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Draw tiles at equal steps, in order of their distance from the diagonal, since neighbours are alike."""
    order = torch.argsort(tiles[:, 1] * columns - tiles[:, 0] * rows, stable=True)
    places = (torch.arange(count) + torch.rand((), dtype=torch.float64, generator=generator)) * (len(tiles) / count)
    return tiles[order[places.long().clamp(max=len(tiles) - 1)]]


class _Sized:
    """A pattern on queries at positions first, first + 1, … and keys 0, 1, …."""

    def __init__(self, pattern: Pattern, first: int, queries: int, keys: int) -> None:
        self.pattern, self.first, self.queries, self.keys = pattern, first, queries, keys

    def cut(self, tiles: Tensor, rows: int, columns: int) -> tuple[int, Tensor]:
        """Cut tiles into smaller ones of these sides: the pairs of those that are whole, and those allowed in part."""
        checkpoint()
        branches = torch.arange(_BRANCHES)
        row = (tiles[:, :1] * _BRANCHES + branches)[:, :, None]  # [N, 8, 1]
        column = (tiles[:, 1:] * _BRANCHES + branches)[:, None, :]  # [N, 1, 8]
        top, left = (row * rows).clamp(max=self.queries), (column * columns).clamp(max=self.keys)
        bottom, right = (top + rows).clamp(max=self.queries), (left + columns).clamp(max=self.keys)
        area = (bottom - top) * (right - left)
        coverage = self.pattern.coverage(Tiles(top + self.first, bottom - 1 + self.first, left, right - 1))
        some, every = coverage.some.expand(area.shape) & (area > 0), coverage.every.expand(area.shape)
        n, i, j = torch.nonzero(some & ~every, as_tuple=True)
        return int(area[some & every].sum()), torch.stack([row[n, i, 0], column[n, 0, j]], 1)

    def lay_out(self, tiles: Tensor, rows: int, columns: int) -> int:
        """Count the pairs of tiles one by one."""
        checkpoint()
        i = (tiles[:, :1] * rows + torch.arange(rows))[:, :, None]  # [N, R, 1]
        j = (tiles[:, 1:] * columns + torch.arange(columns))[:, None, :]  # [N, 1, K]
        allowed = self.pattern.allows(i + self.first, j).expand(len(tiles), rows, columns)
        if self.queries % rows or self.keys % columns:  # the last tiles are not whole
            allowed = allowed & (i < self.queries) & (j < self.keys)
        return int(torch.count_nonzero(allowed))

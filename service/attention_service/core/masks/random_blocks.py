"""A part of patterns: blocks of keys, drawn at random for each block of queries.

R queries, n draws for each of them, K keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention_service.core.dropout import noise
from attention_service.core.masks.pattern import Bounds, Coverage, PatternPart, Tiles

_DRAWS_OF_A_TILE = 256
_AT_ONCE = 2**14
"""Maximum number of draws computed together, unless one query has more."""


@dataclass(frozen=True)
class DrawnBlocks(PatternPart):
    """⌊j / size⌋ is one of the blocks drawn, without repetition, for ⌊p / size⌋."""

    size: int
    count: int
    seed: int
    blocks: int
    """Number of key blocks."""

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """Mark the first key of each drawn block, and look up the first key of each key's block."""
        block = j // self.size
        keys = block.shape[-1]
        if not self._draws or not keys:
            return torch.zeros((1,) * j.ndim, dtype=torch.bool, device=j.device)
        alike = block.numel() == keys  # for all queries
        lines = block.view(1, keys) if alike else block.expand(*p.shape[:-1], keys).reshape(-1, keys)
        first = torch.searchsorted(lines, lines)
        marks = torch.zeros(*p.shape[:-1], keys + 1, dtype=torch.bool, device=j.device)
        row, most, rows = p.flatten(), max(1, _AT_ONCE // self._draws), marks.view(-1, keys + 1)
        for at in range(0, len(row), most):
            some = slice(at, at + most)
            drawn = self._drawn(row[some])
            line = lines[0] if alike else lines[some]
            place = torch.searchsorted(line, drawn)
            near = place.clamp(max=keys - 1)
            nearest_drawn = line[near] if alike else line.gather(-1, near)
            rows[some].scatter_(1, place.where(nearest_drawn == drawn, keys), True)  # elsewhere: behind the last key
        if alike:
            return marks.index_select(-1, first[0])
        return marks.gather(-1, first.view(*p.shape[:-1], keys))

    def coverage(self, tiles: Tiles) -> Coverage:
        """Check the draws of each row of blocks in a tile; with too many draws the result is inconclusive."""
        first, last = tiles.p_first // self.size, tiles.p_last // self.size  # [..., Q, 1]
        rows = int((last - first).max()) + 1 if first.numel() else 0
        if rows * self._draws > _DRAWS_OF_A_TILE:
            unknown = torch.ones((), dtype=torch.bool, device=first.device)
            return Coverage(unknown, ~unknown)
        # The last row again where a tile has fewer.
        row = torch.minimum(first + torch.arange(rows, device=first.device), last)
        blocks = self._drawn((row * self.size).flatten()).view(*row.shape[:-1], rows * self._draws).sort(-1).values
        left, right = tiles.j_first // self.size, tiles.j_last // self.size  # [..., 1, K]
        inside = _up_to(blocks, right) - _up_to(blocks, left - 1)
        return Coverage(inside > 0, inside == rows * (right - left + 1))

    @property
    def _draws(self) -> int:
        """Number of blocks drawn per query."""
        return min(self.count, self.blocks)

    def _drawn(self, p: Tensor) -> Tensor:
        """Draw ``[R, n]`` blocks for ``[R]`` queries: Floyd's algorithm (Bentley and Floyd 1987), one number per draw.

        A repeated number is replaced by the largest possible one.
        """
        most = torch.arange(self.blocks - self._draws, self.blocks, device=p.device)
        drawn = noise(self.seed, p[:, None] // self.size, most) % (most + 1)
        for index in range(1, self._draws):
            again = (drawn[:, :index] == drawn[:, index : index + 1]).any(1)
            drawn[:, index].masked_fill_(again, self.blocks - self._draws + index)
        return drawn

    @property
    def bounds(self) -> Bounds:
        """Return bounds of few keys at any distance."""
        return Bounds(left=True, right=True, strips=frozenset({"r"}))


def _up_to(blocks: Tensor, limits: Tensor) -> Tensor:
    """Count the blocks ``[..., Q, n]``, in ascending order, up to each limit ``[..., 1, K]``."""
    return torch.searchsorted(blocks, limits.expand(*blocks.shape[:-1], limits.shape[-1]).contiguous(), right=True)

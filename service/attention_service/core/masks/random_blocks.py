"""A part of patterns: blocks of keys, drawn at random for each block of queries.

R queries, n draws for each of them, K keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention_service.core.dropout import noise
from attention_service.core.masks.pattern import Bounds, Coverage, Part, Tiles, Turns

_DRAWS_OF_A_TILE = 256
_AT_ONCE = 2**14
"""Maximum number of draws computed together, unless one query has more."""


@dataclass(frozen=True)
class Drawn(Part):
    """⌊j / size⌋ is one of the blocks drawn, without repetition, for ⌊p / size⌋."""

    size: int
    count: int
    seed: int
    blocks: int
    """Number of key blocks."""

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """Mark the drawn blocks and look up each key's block."""
        block = j // self.size
        if not self._draws:
            return torch.zeros((1,) * j.ndim, dtype=torch.bool, device=j.device)
        if j.shape[:-1].numel() != 1:
            return self._found(p, block)
        row, keys = p.flatten(), j.shape[-1]
        before = block.flatten()[:1] - 1
        column = block.flatten() - before  # of a key's block, from 1 on: 0 and keys + 1 are for draws elsewhere
        marks = torch.zeros(len(row), keys + 2, dtype=torch.bool, device=j.device)
        for some, own in zip(torch.split(row, self._rows), torch.split(marks, self._rows), strict=True):
            own.scatter_(1, (self._drawn(some) - before).clamp_(0, keys + 1), True)
        return marks.index_select(1, column).view(*p.shape[:-1], keys)

    def _found(self, p: Tensor, block: Tensor) -> Tensor:
        """Look up the blocks ``[R, K]`` among the draws of queries ``[R, 1]``."""
        drawn = self._drawn(p.flatten()).sort(1).values
        at = torch.searchsorted(drawn, block.contiguous()).clamp_(max=self._draws - 1)
        return drawn.gather(1, at) == block

    def coverage(self, tiles: Tiles) -> Coverage:
        """Check the draws of each row of blocks in a tile; with too many draws the result is inconclusive."""
        first, last = tiles.p_first // self.size, tiles.p_last // self.size  # [Q, 1]
        rows = int((last - first).max()) + 1 if first.numel() else 0
        if rows * self._draws > _DRAWS_OF_A_TILE:
            unknown = torch.ones((), dtype=torch.bool, device=first.device)
            return Coverage(unknown, ~unknown)
        # The last row again where a tile has fewer.
        row = torch.minimum(first + torch.arange(rows, device=first.device), last)
        blocks = self._drawn((row * self.size).flatten())
        start = blocks.view(len(first), rows * self._draws) * self.size  # [Q, rows · n]
        edges = torch.cat([tiles.j_first[0], tiles.j_last[0, -1:] + 1])
        begins = torch.searchsorted(edges, start, right=True) - 1
        ends = torch.searchsorted(edges, start + (self.size - 1), right=True)
        # Of each tile how many draws there are in it: those that have begun, less those that have ended.
        inside = torch.zeros(len(first), len(edges) + 1, dtype=torch.int32, device=first.device)
        one = torch.ones((), dtype=torch.int32, device=first.device).expand_as(begins)
        inside.scatter_add_(1, begins.clamp_(min=0), one).scatter_add_(1, ends, -one)
        inside = inside.cumsum(1, dtype=torch.int32)[:, : len(edges) - 1]
        wide = tiles.j_last // self.size - tiles.j_first // self.size + 1
        return Coverage(inside > 0, inside == rows * wide)

    @property
    def _draws(self) -> int:
        """Number of blocks drawn per query."""
        return min(self.count, self.blocks)

    @property
    def _rows(self) -> int:
        """Number of queries computed together."""
        return max(1, _AT_ONCE // max(1, self._draws))

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

    def edges(self, p: Tensor) -> Tensor:
        """Return both ends of each block."""
        if not self._draws:
            return p.new_empty(len(p), 0)
        starts = self._drawn(p) * self.size
        return torch.cat([starts, starts + self.size], dim=1)

    @property
    def turns(self) -> Turns:
        """Return a new kind of row at each block of queries."""
        return Turns(period=None)

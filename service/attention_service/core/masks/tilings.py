"""Parts of patterns that cut positions into blocks, documents and remainders."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attention_service.core.masks.pattern import Bounds, Coverage, Line, PatternPart, Tiles
from attention_service.core.tensors import to_device


@dataclass(frozen=True)
class Leading(Line, PatternPart):
    """j < length."""

    length: int

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """Compare the key index; all queries share the result."""
        return j < self.length

    def coverage(self, tiles: Tiles) -> Coverage:
        """Compare the tile's first and last key."""
        return Coverage(tiles.j_first < self.length, tiles.j_last < self.length)


@dataclass(frozen=True)
class Blocks(PatternPart):
    """|⌊j / size⌋ − ⌊p / size⌋| ≤ neighbours."""

    size: int
    neighbours: int = 0

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """Compare block numbers."""
        own, other = p // self.size, j // self.size
        if not self.neighbours:
            return own == other
        return (other >= own - self.neighbours) & (other <= own + self.neighbours)

    def coverage(self, tiles: Tiles) -> Coverage:
        """Return the coverage of a band over the block numbers."""
        nearest = tiles.j_first // self.size - tiles.p_last // self.size
        farthest = tiles.j_last // self.size - tiles.p_first // self.size
        return Coverage(
            (farthest >= -self.neighbours) & (nearest <= self.neighbours),
            (nearest >= -self.neighbours) & (farthest <= self.neighbours),
        )


@dataclass(frozen=True)
class Stripes(PatternPart):
    """(p − j) mod stride = 0."""

    stride: int

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """Compare remainders."""
        return p % self.stride == j % self.stride

    def coverage(self, tiles: Tiles) -> Coverage:
        """Test for a multiple of the stride between the least and the largest j − p, and for no other number."""
        least, largest = tiles.nearest, tiles.farthest
        some = largest // self.stride * self.stride >= least
        alone = least == largest
        return Coverage(some, some & alone if self.stride > 1 else torch.ones_like(some))

    @property
    def bounds(self) -> Bounds:
        """Return bounds of a share of all keys."""
        return Bounds(left=True, right=True, strips=frozenset({"n/s"}))


@dataclass(frozen=True)
class Remainder(Line, PatternPart):
    """j mod size ≥ least."""

    size: int
    least: int

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """Compare the key's remainder; all queries share the result."""
        return j % self.size >= self.least

    def coverage(self, tiles: Tiles) -> Coverage:
        """Compare block and remainder of the first and the last key: the allowed keys are at the end of a block."""
        one = tiles.j_first // self.size == tiles.j_last // self.size
        some = (tiles.j_last % self.size >= self.least) | ~one & (self.least < self.size)
        return Coverage(some, (tiles.j_first % self.size >= self.least) & (one | (self.least <= 0)))

    @property
    def bounds(self) -> Bounds:
        """Return bounds of a share of all keys."""
        return Bounds(left=True, right=True, strips=frozenset({"n·c/s"}))


@dataclass(frozen=True)
class Segments(PatternPart):
    """p and j lie between the same two of the ends, or both beyond the last; p before the first sees nothing."""

    ends: tuple[int, ...]

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """Count the ends at or before each position; no key is before the first."""
        return self._number(p) == self._number(j)

    def coverage(self, tiles: Tiles) -> Coverage:
        """Compare the segments of the first and the last query and key."""
        p_first, p_last = self._number(tiles.p_first), self._number(tiles.p_last)
        j_first, j_last = self._number(tiles.j_first), self._number(tiles.j_last)
        one = (p_first == p_last) & (j_first == j_last)
        return Coverage((p_first <= j_last) & (j_first <= p_last), one & (p_first == j_first))

    def _number(self, positions: Tensor) -> Tensor:
        return torch.searchsorted(to_device(self._listed, positions.device), positions.contiguous(), right=True)

    @cached_property
    def _listed(self) -> Tensor:
        return torch.tensor(self.ends)

    @property
    def bounds(self) -> Bounds:
        """Return unlimited bounds: the last segment grows with the sequence."""
        return Bounds(left=False, right=False)

"""The parts of most masks: bands along the diagonal, marked queries and marked keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attention_service.core.masks.pattern import Bounds, Coverage, Line, PatternPart, Tiles
from attention_service.core.tensors import to_device


@dataclass(frozen=True)
class Band(PatternPart):
    """p + low ≤ j ≤ p + high; None is unlimited."""

    low: int | None = None
    high: int | None = None

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """Compare j − p with each limit."""
        inside = torch.ones((1,) * j.ndim, dtype=torch.bool, device=j.device)
        if self.low is not None:
            inside = j >= p + self.low
        if self.high is not None:
            inside = inside & (j <= p + self.high)
        return inside

    def coverage(self, tiles: Tiles) -> Coverage:
        """Compare the least and the largest j − p of each tile with the limits, before broadcasting to all tiles."""
        some = every = torch.ones((), dtype=torch.bool, device=tiles.p_first.device)
        if self.low is not None:
            some, every = tiles.j_last >= tiles.p_first + self.low, tiles.j_first >= tiles.p_last + self.low
        if self.high is not None:
            some = some & (tiles.j_first <= tiles.p_last + self.high)
            every = every & (tiles.j_last <= tiles.p_first + self.high)
        return Coverage(some, every)

    @property
    def bounds(self) -> Bounds:
        """Return which sides have a limit."""
        return Bounds(self.low is not None, self.high is not None)

    def pairs(self, queries: int, keys: int) -> int:
        """Count the allowed pairs of queries at 0, 1, … and keys at 0, 1, …."""

        def sums(places: int) -> int:  # Σ min(t, keys) over t = 1, 2, … places
            rising = max(min(places, keys), 0)
            return rising * (rising + 1) // 2 + max(places - keys, 0) * keys

        def up_to(limit: int) -> int:  # pairs with j ≤ p + limit
            return sums(limit + queries) - sums(limit)

        inside = queries * keys if self.high is None else up_to(self.high)
        return max(0, inside - (0 if self.low is None else up_to(self.low - 1)))


@dataclass(frozen=True)
class _Listed(Line):
    """Mixin: a set of listed positions."""

    positions: tuple[int, ...]

    @cached_property
    def _listed(self) -> Tensor:
        return torch.tensor(self.positions)


@dataclass(frozen=True)
class Queries(_Listed, PatternPart):
    """p is one of the positions."""

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """Look up the positions."""
        return torch.isin(p, to_device(self._listed, p.device))

    def coverage(self, tiles: Tiles) -> Coverage:
        """Count the listed positions among the tile's queries."""
        return _marked(self.positions, tiles.p_first, tiles.p_last)


@dataclass(frozen=True)
class Keys(_Listed, PatternPart):
    """j is one of the positions."""

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """Look up the positions."""
        return torch.isin(j, to_device(self._listed, j.device))

    def coverage(self, tiles: Tiles) -> Coverage:
        """Count the listed positions among the tile's keys."""
        return _marked(self.positions, tiles.j_first, tiles.j_last)


def _marked(positions: Sequence[int], first: Tensor, last: Tensor) -> Coverage:
    """Count the positions between first and last."""
    marks = torch.tensor(sorted(set(positions)), dtype=torch.int64, device=first.device)
    count = torch.searchsorted(marks, last, right=True) - torch.searchsorted(marks, first)
    return Coverage(count > 0, count == last - first + 1)

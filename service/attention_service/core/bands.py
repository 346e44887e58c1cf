"""The parts that most masks are built of: bands along the diagonal, marked queries and marked keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attention_service.core.patterns import Bounds, Coverage, Line, Part, Tiles, Turns


@dataclass(frozen=True)
class Band(Part):
    """p + low ≤ j ≤ p + high; None is unlimited."""

    low: int | None = None
    high: int | None = None

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """Compared with each limit there is."""
        inside = torch.ones((1,) * j.ndim, dtype=torch.bool, device=j.device)
        if self.low is not None:
            inside = j >= p + self.low
        if self.high is not None:
            inside = inside & (j <= p + self.high)
        return inside

    def coverage(self, tiles: Tiles) -> Coverage:
        """By the least and the largest j − p, which are compared before they are laid out for every tile."""
        some = every = torch.ones((), dtype=torch.bool, device=tiles.p_first.device)
        if self.low is not None:
            some, every = tiles.j_last >= tiles.p_first + self.low, tiles.j_first >= tiles.p_last + self.low
        if self.high is not None:
            some = some & (tiles.j_first <= tiles.p_last + self.high)
            every = every & (tiles.j_last <= tiles.p_first + self.high)
        return Coverage(some, every)

    @property
    def building(self) -> int:
        """Each comparison, and both together."""
        return 3 if self.low is not None and self.high is not None else 2

    @property
    def bounds(self) -> Bounds:
        """By the limits there are."""
        return Bounds(self.low is not None, self.high is not None)

    @property
    def _starts(self) -> list[int]:
        return [*([] if self.low is None else [self.low]), *([] if self.high is None else [self.high + 1])]

    def edges(self, p: Tensor) -> Tensor:
        """Both ends."""
        return p[:, None] + torch.tensor(self._starts, dtype=torch.int64)

    @property
    def turns(self) -> Turns:
        """They move with p."""
        return Turns(moving=tuple((start, start) for start in self._starts))


@dataclass(frozen=True)
class _Listed(Line):
    """Some positions."""

    positions: tuple[int, ...]

    @cached_property
    def _listed(self) -> Tensor:
        return torch.tensor(self.positions)


@dataclass(frozen=True)
class Queries(_Listed, Part):
    """p is one of the positions."""

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """By look-up."""
        return torch.isin(p, self._listed.to(p.device))

    def coverage(self, tiles: Tiles) -> Coverage:
        """By how many of the positions are among the tile's queries."""
        return _marked(self.positions, tiles.p_first, tiles.p_last)

    def edges(self, p: Tensor) -> Tensor:
        """None within a row."""
        return p.new_empty(len(p), 0)

    @property
    def turns(self) -> Turns:
        """Rows differ where positions begin and end."""
        return Turns(rows=runs(self.positions))


@dataclass(frozen=True)
class Keys(_Listed, Part):
    """j is one of the positions."""

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """By look-up."""
        return torch.isin(j, self._listed.to(j.device))

    def coverage(self, tiles: Tiles) -> Coverage:
        """By how many of the positions are among the tile's keys."""
        return _marked(self.positions, tiles.j_first, tiles.j_last)

    def edges(self, p: Tensor) -> Tensor:
        """Where positions begin and end."""
        return torch.tensor(runs(self.positions)).expand(len(p), -1)

    @property
    def turns(self) -> Turns:
        """The same for all rows."""
        return Turns(still=runs(self.positions))


def runs(positions: Sequence[int]) -> tuple[int, ...]:
    """Where positions side by side begin, and where they have ended."""
    inside = set(positions)
    starts = {position for position in inside if position - 1 not in inside}
    stops = {position + 1 for position in inside if position + 1 not in inside}
    return tuple(sorted(starts | stops))


def _marked(positions: Sequence[int], first: Tensor, last: Tensor) -> Coverage:
    """By how many of the positions lie between first and last."""
    marks = torch.tensor(sorted(set(positions)), dtype=torch.int64, device=first.device)
    count = torch.searchsorted(marks, last, right=True) - torch.searchsorted(marks, first)
    return Coverage(count > 0, count == last - first + 1)

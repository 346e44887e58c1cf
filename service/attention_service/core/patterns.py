"""Sets of query-key pairs, said once and read twice: as a dense tensor, and as a count that builds none.

A query stands at position p (its index plus the offset), a key at its index j. A pattern is built of bands along the
diagonal, marked queries and marked keys, by union and intersection.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Cell:
    """Pairs on which every band is constant: one stretch of j − p, one kind of query, each kind of key."""

    start: int
    """j − p from here …"""
    stop: int
    """… to before here."""
    query: int | None
    """A marked query's position; None for the queries that no pattern marks."""
    keys: NDArray[np.int64]
    """-1 for the keys that no pattern marks, then each marked key's position."""


class Pattern(Protocol):
    """A set of pairs (p, j)."""

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """Bool, broadcastable to the shape of p and j together: whether a pair is in the set."""

    def holds(self, cell: Cell) -> NDArray[np.bool_]:
        """The same for a cell, for each kind of key (or one answer for all of them)."""

    def parts(self) -> "Iterator[Band | Queries | Keys]":
        """The bands and markings that it is built of."""


@dataclass(frozen=True)
class Band:
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

    def holds(self, cell: Cell) -> NDArray[np.bool_]:
        """A cell lies on one side of each limit."""
        above = self.low is None or self.low <= cell.start
        return np.array(above and (self.high is None or cell.stop <= self.high + 1))

    def parts(self) -> Iterator["Band"]:
        """Itself."""
        yield self


@dataclass(frozen=True)
class Queries:
    """p is one of the positions."""

    positions: tuple[int, ...]

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """By look-up."""
        return torch.isin(p, torch.tensor(self.positions, device=p.device))

    def holds(self, cell: Cell) -> NDArray[np.bool_]:
        """The same for all keys."""
        return np.array(cell.query in self.positions)

    def parts(self) -> Iterator["Queries"]:
        """Itself."""
        yield self


@dataclass(frozen=True)
class Keys:
    """j is one of the positions."""

    positions: tuple[int, ...]

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """By look-up."""
        return torch.isin(j, torch.tensor(self.positions, device=j.device))

    def holds(self, cell: Cell) -> NDArray[np.bool_]:
        """Of each kind of key."""
        return np.isin(cell.keys, self.positions)

    def parts(self) -> Iterator["Keys"]:
        """Itself."""
        yield self


@dataclass(frozen=True)
class AllOf:
    """The intersection; of nothing, every pair."""

    of: Sequence[Pattern]

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """In each of them."""
        everything = torch.ones((1,) * j.ndim, dtype=torch.bool, device=j.device)
        return reduce(torch.logical_and, (part.allows(p, j) for part in self.of), everything)

    def holds(self, cell: Cell) -> NDArray[np.bool_]:
        """In each of them."""
        return reduce(np.logical_and, (part.holds(cell) for part in self.of), np.array(True))

    def parts(self) -> Iterator[Band | Queries | Keys]:
        """Those of all."""
        for part in self.of:
            yield from part.parts()


@dataclass(frozen=True)
class AnyOf:
    """The union; of nothing, no pair."""

    of: Sequence[Pattern]

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """In one of them."""
        nothing = torch.zeros((1,) * j.ndim, dtype=torch.bool, device=j.device)
        return reduce(torch.logical_or, (part.allows(p, j) for part in self.of), nothing)

    def holds(self, cell: Cell) -> NDArray[np.bool_]:
        """In one of them."""
        return reduce(np.logical_or, (part.holds(cell) for part in self.of), np.array(False))

    def parts(self) -> Iterator[Band | Queries | Keys]:
        """Those of all."""
        for part in self.of:
            yield from part.parts()

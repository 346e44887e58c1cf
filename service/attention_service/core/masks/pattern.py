"""Sets of query-key pairs, stated once and read as a dense tensor and in tiles.

A query stands at position p (its index plus the offset), a key at its index j. A pattern is built of parts, such as
bands along the diagonal (``bands``) and blocks (``tilings``), by union and intersection (``combinations``).
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Pattern(Hashable, Protocol):
    """A set of pairs (p, j)."""

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """Test each pair: bool, broadcastable to the shape of p and j together.

        p ``[…, R, 1]``; j ``[…, 1, K]``, keys in ascending order.
        """

    def parts(self) -> "Iterator[PatternPart]":
        """Yield the parts of the pattern."""

    def coverage(self, tiles: "Tiles") -> "Coverage":
        """Return which tiles have allowed pairs. A tile is a range of queries against a range of keys."""

    @property
    def bounds(self) -> "Bounds":
        """The number of keys that a query may see as the sequence grows."""


@dataclass(frozen=True)
class Tiles:
    """Ranges of queries ``[…, Q, 1]`` against ranges of keys ``[…, 1, K]``: int64, both ends included."""

    p_first: Tensor
    p_last: Tensor
    j_first: Tensor
    j_last: Tensor

    @property
    def nearest(self) -> Tensor:
        """The least j − p of each tile."""
        return self.j_first - self.p_last

    @property
    def farthest(self) -> Tensor:
        """The largest j − p of each tile; every number between the two is the j − p of some pair."""
        return self.j_last - self.p_first


@dataclass(frozen=True)
class Coverage:
    """The allowed pairs of each tile: bool, broadcastable to the shape of the tiles."""

    some: Tensor
    """False only where no pair of the tile is allowed."""
    every: Tensor
    """True only where all pairs are."""


@dataclass(frozen=True)
class Bounds:
    """Bounds on the number of keys that a query may see as the sequence grows."""

    left: bool
    """True if keys before the query are bounded, apart from the strips."""
    right: bool
    """True if keys after the query are bounded, apart from the strips."""
    strips: frozenset[str] = frozenset()
    """Further terms of the asymptotic cost: ``g`` for global tokens."""


class PatternPart(ABC):
    """A pattern that is built of no other. By default a query sees few keys."""

    def parts(self) -> "Iterator[PatternPart]":
        """Yield itself."""
        yield self

    @abstractmethod
    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """Test each pair: bool, broadcastable to the shape of p and j together."""

    @abstractmethod
    def coverage(self, tiles: Tiles) -> Coverage:
        """Return which tiles have allowed pairs; exact unless a subclass says otherwise."""

    @property
    def bounds(self) -> Bounds:
        """Return bounds of few keys per query."""
        return Bounds(left=True, right=True)


class Line:
    """Mixin before ``PatternPart``: one result per query or per key alone."""

    @property
    def bounds(self) -> Bounds:
        """Return bounds under which few rows or columns are whole."""
        return Bounds(left=True, right=True, strips=frozenset({"g"}))

"""Sets of query-key pairs, said once and read many times: as a dense tensor, as a count and as a cost.

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
        """Bool, broadcastable to the shape of p and j together: whether a pair is in the set.

        p ``[…, R, 1]``; j ``[…, 1, K]``, keys side by side in ascending order, or ``[R, K]``, a row of any for each p.
        """

    def parts(self) -> "Iterator[Part]":
        """What it is built of."""

    def coverage(self, tiles: "Tiles") -> "Coverage":
        """What it allows of each tile, where a tile is a stretch of queries against a stretch of keys."""

    @property
    def laid_out(self) -> bool:
        """Whether the answer is as large as all pairs, and not one for each query or for each key."""

    @property
    def building(self) -> int:
        """How many booleans for each pair are held at a time while ``allows`` runs."""

    def beside(self, queries: int) -> int:
        """Bytes that it holds besides, for so many queries."""

    @property
    def bounds(self) -> "Bounds":
        """How many keys it leaves a query as the sequence grows."""


@dataclass(frozen=True)
class Tiles:
    """Stretches of queries ``[Q, 1]`` against stretches of keys ``[1, K]`` side by side: int64, both ends included."""

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
    """What a pattern allows of each tile: bool, broadcastable to the shape of the tiles."""

    some: Tensor
    """False only where no pair of the tile is allowed."""
    every: Tensor
    """True only where all pairs are."""


@dataclass(frozen=True)
class Bounds:
    """How many keys a pattern leaves a query as the sequence grows."""

    left: bool
    """Whether those before the query are bounded, but for the strips."""
    right: bool
    """Whether those after it are bounded, but for the strips."""
    strips: frozenset[str] = frozenset()
    """What comes on top, as terms in an asymptotic cost: ``g`` for global tokens."""


@dataclass(frozen=True)
class Turns:
    """Where the keys that a row allows change, by the position of its query; what makes the sum over rows short.

    From one row to the next, an edge either moves on with p or stays.
    """

    moving: tuple[tuple[int, int], ...] = ()
    """Edges between p + low and p + high."""
    still: tuple[int, ...] = ()
    """Edges that all rows have in common."""
    rows: tuple[int, ...] = ()
    """Positions of queries at which rows of another kind begin."""
    period: int | None = 1
    """So many rows on, the moving edges have moved by as much; None where they never repeat."""


class Part(ABC):
    """A pattern that is built of no other. By default it is laid out at once, and leaves a query few keys."""

    @property
    def every(self) -> int | None:
        """After how many keys the edges repeat; None where there are no more than ``edges`` gives."""
        return None

    @property
    def laid_out(self) -> bool:
        """As large as all pairs."""
        return True

    @property
    def building(self) -> int:
        """The answer alone."""
        return 1

    def beside(self, queries: int) -> int:
        """Nothing."""
        return 0

    def parts(self) -> "Iterator[Part]":
        """Itself."""
        yield self

    @abstractmethod
    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """Bool, broadcastable to the shape of p and j together: whether a pair is in the set."""

    @abstractmethod
    def coverage(self, tiles: Tiles) -> Coverage:
        """What it allows of each tile, exactly unless it says otherwise."""

    @property
    def bounds(self) -> Bounds:
        """Few keys for each query."""
        return Bounds(left=True, right=True)

    @abstractmethod
    def edges(self, p: Tensor) -> Tensor:
        """``[R]`` to ``[R, E]``: the keys from which another answer holds, by query; of what repeats, one each."""

    @property
    @abstractmethod
    def turns(self) -> Turns:
        """How the edges depend on p."""


class Line:
    """Before ``Part``: one answer for each query, or for each key, whatever it meets."""

    @property
    def laid_out(self) -> bool:
        """As long as the queries or the keys."""
        return False

    @property
    def building(self) -> int:
        """Nothing over pairs."""
        return 0

    @property
    def bounds(self) -> Bounds:
        """Few rows or columns are seen whole."""
        return Bounds(left=True, right=True, strips=frozenset({"g"}))


def making(pattern: Pattern, pairs: int, queries: int) -> int:
    """Bytes that are held while a pattern is laid out over so many pairs: what is besides is gone before the last."""
    return max(pairs * pattern.building, pairs * max(0, pattern.building - 1) + pattern.beside(queries))

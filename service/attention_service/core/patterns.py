"""Sets of query-key pairs, said once and read many times: as a dense tensor, as a count and as a cost.

A query stands at position p (its index plus the offset), a key at its index j. A pattern is built of parts, such as
bands along the diagonal and marked queries and keys, by union and intersection (``combinations``). ``tilings`` has more
parts.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from attention_service.core import steps
from attention_service.core.tape import BOOL, INTEGER, Sketch, Tape


class Pattern(Hashable, Protocol):
    """A set of pairs (p, j)."""

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """Bool, broadcastable to the shape of p and j together: whether a pair is in the set.

        p ``[…, R, 1]``; j ``[…, 1, K]``, keys side by side in ascending order, or ``[R, K]``, a row of any for each p.
        """

    def sketched(self, tape: Tape, p: Sketch, j: Sketch) -> Sketch:
        """``allows``, step by step."""

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
    def sketched(self, tape: Tape, p: Sketch, j: Sketch) -> Sketch:
        """``allows``, step by step."""

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

    def sketched(self, tape: Tape, p: Sketch, j: Sketch) -> Sketch:
        """A limit and a comparison each, and both together."""
        inside = steps.filled(tape, (1,) * len(j.dims), BOOL)
        if self.low is not None:
            inside = steps.plain(tape, j, steps.plain(tape, p), itemsize=BOOL)
        if self.high is not None:
            inside = steps.plain(tape, inside, steps.plain(tape, j, steps.plain(tape, p), itemsize=BOOL))
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
class Queries(Part):
    """p is one of the positions."""

    positions: tuple[int, ...]

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """By look-up."""
        return torch.isin(p, self._listed.to(p.device))

    def sketched(self, tape: Tape, p: Sketch, j: Sketch) -> Sketch:
        """One look-up."""
        return steps.plain(tape, p, Sketch((len(self.positions),), INTEGER), itemsize=BOOL, dims=p.dims)

    def coverage(self, tiles: Tiles) -> Coverage:
        """By how many of the positions are among the tile's queries."""
        return _marked(self.positions, tiles.p_first, tiles.p_last)

    @cached_property
    def _listed(self) -> Tensor:
        return torch.tensor(self.positions)

    @property
    def laid_out(self) -> bool:
        """One answer for each query."""
        return False

    @property
    def building(self) -> int:
        """Nothing over pairs."""
        return 0

    @property
    def bounds(self) -> Bounds:
        """Few rows see everything."""
        return Bounds(left=True, right=True, strips=frozenset({"g"}))

    def edges(self, p: Tensor) -> Tensor:
        """None within a row."""
        return p.new_empty(len(p), 0)

    @property
    def turns(self) -> Turns:
        """Rows differ where positions begin and end."""
        return Turns(rows=runs(self.positions))


@dataclass(frozen=True)
class Keys(Part):
    """j is one of the positions."""

    positions: tuple[int, ...]

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """By look-up."""
        return torch.isin(j, self._listed.to(j.device))

    def sketched(self, tape: Tape, p: Sketch, j: Sketch) -> Sketch:
        """One look-up."""
        return steps.plain(tape, j, Sketch((len(self.positions),), INTEGER), itemsize=BOOL, dims=j.dims)

    def coverage(self, tiles: Tiles) -> Coverage:
        """By how many of the positions are among the tile's keys."""
        return _marked(self.positions, tiles.j_first, tiles.j_last)

    @cached_property
    def _listed(self) -> Tensor:
        return torch.tensor(self.positions)

    @property
    def laid_out(self) -> bool:
        """One answer for each key."""
        return False

    @property
    def building(self) -> int:
        """Nothing over pairs."""
        return 0

    @property
    def bounds(self) -> Bounds:
        """Few keys for every query."""
        return Bounds(left=True, right=True, strips=frozenset({"g"}))

    def edges(self, p: Tensor) -> Tensor:
        """Where positions begin and end."""
        return torch.tensor(runs(self.positions)).expand(len(p), -1)

    @property
    def turns(self) -> Turns:
        """The same for all rows."""
        return Turns(still=runs(self.positions))


def making(pattern: Pattern, pairs: int, queries: int) -> int:
    """Bytes that are held while a pattern is laid out over so many pairs: what is besides is gone before the last."""
    return max(pairs * pattern.building, pairs * max(0, pattern.building - 1) + pattern.beside(queries))


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

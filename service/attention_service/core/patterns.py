"""Sets of query-key pairs, said once and read many times: as a dense tensor, as a count and as a cost.

A query stands at position p (its index plus the offset), a key at its index j. A pattern is built of parts, such as
bands along the diagonal and marked queries and keys, by union and intersection. ``tilings`` has more parts.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Pattern(Hashable, Protocol):
    """A set of pairs (p, j)."""

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """Bool, broadcastable to the shape of p and j together: whether a pair is in the set."""

    def parts(self) -> "Iterator[Part]":
        """What it is built of."""

    @property
    def laid_out(self) -> bool:
        """Whether the answer is as large as all pairs, and not one for each query or for each key."""

    @property
    def building(self) -> int:
        """How many booleans for each pair are held at a time while ``allows`` runs."""

    @property
    def bounds(self) -> "Bounds":
        """How many keys it leaves a query as the sequence grows."""


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

    def parts(self) -> "Iterator[Part]":
        """Itself."""
        yield self

    @abstractmethod
    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """Bool, broadcastable to the shape of p and j together: whether a pair is in the set."""

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
        return torch.isin(p, torch.tensor(self.positions, device=p.device))

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
        return torch.isin(j, torch.tensor(self.positions, device=j.device))

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


@dataclass(frozen=True)
class AllOf:
    """The intersection; of nothing, every pair."""

    of: Sequence[Pattern]

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """In each of them."""
        together = torch.ones((1,) * j.ndim, dtype=torch.bool, device=j.device)
        for pattern in self.of:
            together = together & pattern.allows(p, j)
        return together

    def parts(self) -> Iterator[Part]:
        """Those of all."""
        for pattern in self.of:
            yield from pattern.parts()

    @property
    def laid_out(self) -> bool:
        """Unless there is one, and that is not."""
        return _laid_out(self.of)

    @property
    def building(self) -> int:
        """One after the other."""
        return _building(self.of)

    @property
    def bounds(self) -> Bounds:
        """As tight as the tightest; the strips end where others bound what is beside the diagonal."""
        each = [pattern.bounds for pattern in self.of]
        plain = [bounds for bounds in each if not bounds.strips]
        bounded = any(bounds.left for bounds in plain) and any(bounds.right for bounds in plain)
        return Bounds(
            any(bounds.left for bounds in each),
            any(bounds.right for bounds in each),
            frozenset() if bounded else frozenset().union(*(bounds.strips for bounds in each)),
        )


@dataclass(frozen=True)
class AnyOf:
    """The union; of nothing, no pair."""

    of: Sequence[Pattern]

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """In one of them."""
        together = torch.zeros((1,) * j.ndim, dtype=torch.bool, device=j.device)
        for pattern in self.of:
            together = together | pattern.allows(p, j)
        return together

    def parts(self) -> Iterator[Part]:
        """Those of all."""
        for pattern in self.of:
            yield from pattern.parts()

    @property
    def laid_out(self) -> bool:
        """Unless there is one, and that is not."""
        return _laid_out(self.of)

    @property
    def building(self) -> int:
        """One after the other."""
        return _building(self.of)

    @property
    def bounds(self) -> Bounds:
        """As loose as the loosest."""
        each = [pattern.bounds for pattern in self.of]
        return Bounds(
            all(bounds.left for bounds in each),
            all(bounds.right for bounds in each),
            frozenset().union(*(bounds.strips for bounds in each)),
        )


def runs(positions: Sequence[int]) -> tuple[int, ...]:
    """Where positions side by side begin, and where they have ended."""
    inside = set(positions)
    starts = {position for position in inside if position - 1 not in inside}
    stops = {position + 1 for position in inside if position + 1 not in inside}
    return tuple(sorted(starts | stops))


def _laid_out(of: Sequence[Pattern]) -> bool:
    return len(of) > 1 or any(pattern.laid_out for pattern in of)


def _building(of: Sequence[Pattern]) -> int:
    """What is held as each pattern is joined with those before it: those, it, and both together."""
    held = peak = 0
    for index, pattern in enumerate(of):
        peak = max(peak, held + pattern.building)
        joined = int(index > 0 or pattern.laid_out)
        peak = max(peak, held + pattern.laid_out + joined)
        held = joined
    return peak

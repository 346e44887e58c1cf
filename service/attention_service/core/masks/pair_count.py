"""Exact number of pairs that a pattern of bands and marks allows, without laying them out.

The pairs are cut along diagonals, at the limits of all bands: between two cuts a band holds everywhere or nowhere, so
what remains is to count marked queries and keys. Time grows with the marks and bands and not with the sequence.
Patterns with other parts are counted by rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from attention_service.core.masks.bands import Band, Keys, Queries
from attention_service.core.masks.combinations import AllOf, AnyOf
from attention_service.core.masks.pattern import Part, Pattern

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Cell:
    """Pairs on which every band is constant: one stretch of j − p, one kind of query, each kind of key."""

    start: int
    """j − p from here …"""
    stop: int
    """… to before here."""
    query: int | None
    """A marked query's position; None for the queries that no pattern marks."""
    keys: Integers
    """-1 for the keys that no pattern marks, then each marked key's position."""


class Rows(Protocol):
    """A set of queries, by position."""

    def reach(self, shift: int, keys: int) -> int:
        """Return Σ over the rows of the number of keys before p + shift."""

    def up_to(self, positions: Integers) -> Integers:
        """Return the number of rows at or before each position."""


@dataclass(frozen=True)
class Stretch:
    """Queries at consecutive positions."""

    first: int
    size: int

    def reach(self, shift: int, keys: int) -> int:
        """Return Σ clip(p + shift, 0, keys): nothing below 0, a triangle, then all of the keys."""
        start, stop = self.first + shift, self.first + shift + self.size
        low, high = min(max(start, 0), keys), min(max(stop, 0), keys)
        return (high * (high - 1) - low * (low - 1)) // 2 + keys * max(0, stop - max(start, keys))

    def up_to(self, positions: Integers) -> Integers:
        """Subtract the first position."""
        return np.clip(positions - self.first + 1, 0, self.size)


@dataclass(frozen=True)
class Picked:
    """Queries at arbitrary positions, in ascending order."""

    positions: Integers

    def reach(self, shift: int, keys: int) -> int:
        """Sum row by row."""
        return int(np.clip(self.positions + shift, 0, keys).sum())

    def up_to(self, positions: Integers) -> Integers:
        """Bisect the positions."""
        return np.searchsorted(self.positions, positions, side="right")


def countable(pattern: Pattern) -> bool:
    """Return True if the pattern is built of bands and marks alone."""
    return all(isinstance(part, Band | Keys | Queries) for part in pattern.parts())


@lru_cache(maxsize=32)  # one account of costs asks for the same count several times
def count(pattern: Pattern, first: int, queries: int, keys: int) -> int:
    """Return the number of allowed pairs of queries at positions first, first + 1, … and keys 0, 1, …."""
    parts = list(pattern.parts())
    marked_keys = _marks((part.positions for part in parts if isinstance(part, Keys)), 0, keys)
    markings = [frozenset(part.positions) for part in parts if isinstance(part, Queries)]
    marked = _marks(markings, first, first + queries)
    alike: dict[tuple[bool, ...], list[int]] = {}  # marked queries by which of the parts mark them
    for position in marked.tolist():
        alike.setdefault(tuple(position in marking for marking in markings), []).append(position)

    total = 0
    for start, stop in pairwise(_cuts(parts, abs(first) + queries + keys + 1)):
        cell = Cell(start, stop, None, np.concatenate([[-1], marked_keys]))
        total += _pairs(pattern, cell, Stretch(first, queries), keys) - _pairs(pattern, cell, Picked(marked), keys)
        for group in alike.values():
            cell = Cell(start, stop, group[0], cell.keys)
            total += _pairs(pattern, cell, Picked(np.array(group, dtype=np.int64)), keys)
    return total


def _holds(pattern: Pattern, cell: Cell) -> NDArray[np.bool_]:
    """Test the pairs of a cell, for each kind of key (or one answer for all of them)."""
    match pattern:
        case Band():  # a cell lies on one side of each limit
            above = pattern.low is None or pattern.low <= cell.start
            return np.array(above and (pattern.high is None or cell.stop <= pattern.high + 1))
        case Queries():
            return np.array(cell.query in pattern.positions)
        case Keys():
            return np.isin(cell.keys, pattern.positions)
        case AllOf():
            return reduce(np.logical_and, (_holds(each, cell) for each in pattern.of), np.array(True))
        case AnyOf():
            return reduce(np.logical_or, (_holds(each, cell) for each in pattern.of), np.array(False))
    raise TypeError(f"{type(pattern).__name__} is counted by rows")


def _pairs(pattern: Pattern, cell: Cell, rows: Rows, keys: int) -> int:
    """Count the allowed pairs of some rows in a cell: as if no key were marked, then corrected at marked keys."""
    allowed = np.broadcast_to(_holds(pattern, cell), cell.keys.shape).astype(np.int64)
    plain = int(allowed[0])
    marked_keys = cell.keys[1:]
    rows_at = rows.up_to(marked_keys - cell.start) - rows.up_to(marked_keys - cell.stop)
    return plain * (rows.reach(cell.stop, keys) - rows.reach(cell.start, keys)) + int(
        ((allowed[1:] - plain) * rows_at).sum()
    )


def _cuts(parts: list[Part], far: int) -> list[int]:
    """Return the values of j − p at which a band's limit is passed, between ends that no pair reaches."""
    bands = [part for part in parts if isinstance(part, Band)]
    limits = {band.low for band in bands} | {band.high + 1 for band in bands if band.high is not None}
    return sorted({-far, far} | {limit for limit in limits if limit is not None and -far < limit < far})


def _marks(markings: Iterable[Iterable[int]], start: int, stop: int) -> Integers:
    """Return every position from start to before stop, once and ascending."""
    inside = {position for marking in markings for position in marking if start <= position < stop}
    return np.array(sorted(inside), dtype=np.int64)

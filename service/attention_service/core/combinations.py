"""Patterns made of patterns: unions and intersections."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_service.core.patterns import Bounds, Coverage, Part, Pattern, Tiles


@dataclass(frozen=True)
class _Several:
    """What unions and intersections have in common."""

    of: Sequence[Pattern]

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

    def beside(self, queries: int) -> int:
        """The most that one of them holds."""
        return max((pattern.beside(queries) for pattern in self.of), default=0)


@dataclass(frozen=True)
class AllOf(_Several):
    """The intersection; of nothing, every pair."""

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """In each of them."""
        together = torch.ones((1,) * j.ndim, dtype=torch.bool, device=j.device)
        for pattern in self.of:
            together = together & pattern.allows(p, j)
        return together

    def coverage(self, tiles: Tiles) -> Coverage:
        """Some where each of them allows some, though perhaps not the same; of bands with a pair in common, exactly."""
        some = every = torch.ones((), dtype=torch.bool, device=tiles.p_first.device)
        for pattern in self.of:
            coverage = pattern.coverage(tiles)
            some, every = some & coverage.some, every & coverage.every
        return Coverage(some, every)

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
class AnyOf(_Several):
    """The union; of nothing, no pair."""

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """In one of them."""
        together = torch.zeros((1,) * j.ndim, dtype=torch.bool, device=j.device)
        for pattern in self.of:
            together = together | pattern.allows(p, j)
        return together

    def coverage(self, tiles: Tiles) -> Coverage:
        """Every pair where one of them allows every; where several only do so together, it does not tell."""
        some = every = torch.zeros((), dtype=torch.bool, device=tiles.p_first.device)
        for pattern in self.of:
            coverage = pattern.coverage(tiles)
            some, every = some | coverage.some, every | coverage.every
        return Coverage(some, every)

    @property
    def bounds(self) -> Bounds:
        """As loose as the loosest."""
        each = [pattern.bounds for pattern in self.of]
        return Bounds(
            all(bounds.left for bounds in each),
            all(bounds.right for bounds in each),
            frozenset().union(*(bounds.strips for bounds in each)),
        )


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

"""Patterns made of patterns: unions and intersections."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_service.core.patterns import Bounds, Coverage, Part, Pattern, Tiles


@dataclass(frozen=True)
class _Several:
    """Common base of unions and intersections."""

    of: Sequence[Pattern]

    def parts(self) -> Iterator[Part]:
        """Yield the parts of all patterns."""
        for pattern in self.of:
            yield from pattern.parts()

    @property
    def laid_out(self) -> bool:
        """Return False only for a single pattern that is not laid out."""
        return _laid_out(self.of)

    @property
    def building(self) -> int:
        """Return the peak of evaluating one pattern after the other."""
        return _building(self.of)

    def beside(self, queries: int) -> int:
        """Return the largest extra of one pattern."""
        return max((pattern.beside(queries) for pattern in self.of), default=0)


@dataclass(frozen=True)
class AllOf(_Several):
    """The intersection; of nothing, every pair."""

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """Test that every pattern allows the pair."""
        together = torch.ones((1,) * j.ndim, dtype=torch.bool, device=j.device)
        for pattern in self.of:
            together = together & pattern.allows(p, j)
        return together

    def coverage(self, tiles: Tiles) -> Coverage:
        """Return ``some`` if each pattern allows some pair, which may differ; exact for bands with a pair in common."""
        some = every = torch.ones((), dtype=torch.bool, device=tiles.p_first.device)
        for pattern in self.of:
            coverage = pattern.coverage(tiles)
            some, every = some & coverage.some, every & coverage.every
        return Coverage(some, every)

    @property
    def bounds(self) -> Bounds:
        """Return the tightest bounds; strips end where another pattern bounds the keys beside the diagonal."""
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
        """Test that some pattern allows the pair."""
        together = torch.zeros((1,) * j.ndim, dtype=torch.bool, device=j.device)
        for pattern in self.of:
            together = together | pattern.allows(p, j)
        return together

    def coverage(self, tiles: Tiles) -> Coverage:
        """Return ``every`` if one pattern allows every pair; False if only several together do."""
        some = every = torch.zeros((), dtype=torch.bool, device=tiles.p_first.device)
        for pattern in self.of:
            coverage = pattern.coverage(tiles)
            some, every = some | coverage.some, every | coverage.every
        return Coverage(some, every)

    @property
    def bounds(self) -> Bounds:
        """Return the loosest bounds."""
        each = [pattern.bounds for pattern in self.of]
        return Bounds(
            all(bounds.left for bounds in each),
            all(bounds.right for bounds in each),
            frozenset().union(*(bounds.strips for bounds in each)),
        )


def _laid_out(of: Sequence[Pattern]) -> bool:
    return len(of) > 1 or any(pattern.laid_out for pattern in of)


def _building(of: Sequence[Pattern]) -> int:
    """Booleans per pair while each pattern is joined with those before it: both operands and the result."""
    held = peak = 0
    for index, pattern in enumerate(of):
        peak = max(peak, held + pattern.building)
        joined = int(index > 0 or pattern.laid_out)
        peak = max(peak, held + pattern.laid_out + joined)
        held = joined
    return peak

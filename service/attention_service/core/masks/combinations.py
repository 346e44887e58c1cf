"""Patterns made of patterns: unions and intersections."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_service.core.masks.pattern import Bounds, Coverage, Pattern, PatternPart, Tiles


@dataclass(frozen=True)
class _Several:
    """Common base of unions and intersections."""

    of: Sequence[Pattern]

    def parts(self) -> Iterator[PatternPart]:
        """Yield the parts of all patterns."""
        for pattern in self.of:
            yield from pattern.parts()


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
        bounds_of_parts = [pattern.bounds for pattern in self.of]
        plain = [bounds for bounds in bounds_of_parts if not bounds.strips]
        bounded = any(bounds.left for bounds in plain) and any(bounds.right for bounds in plain)
        return Bounds(
            any(bounds.left for bounds in bounds_of_parts),
            any(bounds.right for bounds in bounds_of_parts),
            frozenset() if bounded else frozenset().union(*(bounds.strips for bounds in bounds_of_parts)),
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
        bounds_of_parts = [pattern.bounds for pattern in self.of]
        return Bounds(
            all(bounds.left for bounds in bounds_of_parts),
            all(bounds.right for bounds in bounds_of_parts),
            frozenset().union(*(bounds.strips for bounds in bounds_of_parts)),
        )

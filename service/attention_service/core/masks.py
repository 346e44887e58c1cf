"""Masks of positions: whether the query at p may look at key j.

p is the query's index plus its offset, which is the length of the past unless the request says otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attention_contract import spec
from attention_service.core.counting import count
from attention_service.core.patterns import AllOf, AnyOf, Band, Keys, Pattern, Queries
from attention_service.core.registry import Registry


class MaskRule(Protocol):
    """A mask that depends on positions alone."""

    def pattern(self, surplus: int) -> Pattern:
        """The pairs it allows, where there are ``surplus`` more new keys than queries."""


MASKS = Registry[MaskRule]("mask")
FAR = 2**61
"""Offsets are cut off here: beyond any position in a sequence, and small enough that sums with it fit int64."""


@MASKS.register(
    spec.Causal,
    formula="j ≤ p (top_left); j ≤ p + new keys − queries (bottom_right)",
    cost="O(1) a pair; half of the n² pairs remain",
    source="Vaswani et al. 2017, section 3.2.3",
)
@dataclass(frozen=True)
class Causal:
    """No look ahead."""

    options: spec.Causal

    def pattern(self, surplus: int) -> Pattern:
        """Everything up to the (aligned) diagonal."""
        return Band(high=surplus if self.options.align == "bottom_right" else 0)


@MASKS.register(
    spec.SlidingWindow,
    formula="p − left ≤ j ≤ p + right",
    cost="O(1) a pair; n·(left + right + 1) pairs remain",
    source="Beltagy et al. 2020, section 3.1",
)
@dataclass(frozen=True)
class SlidingWindow:
    """The neighbourhood of the diagonal."""

    options: spec.SlidingWindow

    def pattern(self, surplus: int) -> Pattern:
        """One band."""
        left = self.options.left
        return Band(low=None if left is None else -left, high=self.options.right)


@MASKS.register(
    spec.GlobalTokens,
    formula="p ∈ positions or j ∈ positions",
    cost="O(1) a pair; 2·n·g pairs remain for g positions",
    source="Beltagy et al. 2020, section 3.1",
)
@dataclass(frozen=True)
class GlobalTokens:
    """A cross of rows and columns for each position."""

    options: spec.GlobalTokens

    def pattern(self, surplus: int) -> Pattern:
        """Marked queries and marked keys."""
        positions = tuple(self.options.positions)
        return AnyOf((Queries(positions), Keys(positions)))


@MASKS.register(
    spec.AnyOf,
    formula="at least one of the masks allows (p, j)",
    cost="the sum of its masks",
    source="Beltagy et al. 2020, figure 2d (a window with global tokens)",
)
@dataclass(frozen=True)
class Union:
    """What any of several masks allows."""

    options: spec.AnyOf

    def pattern(self, surplus: int) -> Pattern:
        """The union of theirs."""
        return AnyOf(tuple(MASKS.of(mask).pattern(surplus) for mask in self.options.of))


def pattern_of(masks: Sequence[spec.Mask], queries: int, keys: int, past: int = 0) -> Pattern:
    """What all of the masks allow."""
    patterns = [MASKS.of(mask).pattern(keys - past - queries) for mask in masks]
    return patterns[0] if len(patterns) == 1 else AllOf(patterns)


def allowed(
    masks: Sequence[spec.Mask],
    queries: int,
    keys: int,
    *,
    past: int = 0,
    offsets: Tensor | None = None,
    rows: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Tensor | None:
    """What all of the masks allow: bool ``[1 or B, 1, Q or len(rows), K]``, or None where there is no mask.

    offsets ``[B]`` or ``[]``, by default the past; rows: the indices of the queries to answer for, by default all.
    """
    if not masks:
        return None
    index = torch.arange(queries, device=device) if rows is None else rows.to(device)
    shift = torch.full((), past, device=device) if offsets is None else offsets.to(device).long().clamp(-FAR, FAR)
    p = index.view(1, 1, -1, 1) + shift.view(-1, 1, 1, 1)  # [1 or B, 1, Q, 1]
    j = torch.arange(keys, device=device).view(1, 1, 1, -1)  # [1, 1, 1, K]
    return pattern_of(masks, queries, keys, past).allows(p, j).expand(p.shape[0], 1, p.shape[2], keys)


def allowed_pairs(
    masks: Sequence[spec.Mask], queries: int, keys: int, *, past: int = 0, offset: int | None = None
) -> int:
    """How many of the queries × keys pairs all of the masks allow, exactly, in time that does not grow with them."""
    first = past if offset is None else offset
    return count(pattern_of(masks, queries, keys, past), max(-FAR, min(first, FAR)), queries, keys)

"""Masks of positions: pairs of a query at position p and a key j that it may look at.

p is the query's index plus its offset, which is the length of the past unless the request says otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from attention_contract import spec
from attention_service.core.masks.bands import Band, Keys, Queries
from attention_service.core.masks.combinations import AllOf, AnyOf
from attention_service.core.masks.key_spans import MANY, places
from attention_service.core.masks.pattern import Pattern
from attention_service.core.masks.random_blocks import DrawnBlocks
from attention_service.core.masks.tilings import Blocks, Leading, Remainder, Segments, Stripes
from attention_service.core.problem import Span
from attention_service.core.registry import Registry


class MaskRule(Protocol):
    """A mask that depends on positions alone."""

    def pattern(self, surplus: int, keys: int) -> Pattern:
        """Return the allowed pairs. ``surplus``: new keys minus queries; ``keys``: all keys."""


MASKS = Registry[MaskRule]("mask")
_GRADIENT = "∂s where looking is allowed, 0 elsewhere"
MAX_POSITION = 2**61
"""Offsets are clamped to ±MAX_POSITION: beyond any position in a sequence, and sums with it fit int64."""


@MASKS.register(
    spec.Causal,
    formula="j ≤ p (top_left); j ≤ p + new keys − queries (bottom_right)",
    gradient=_GRADIENT,
    cost="O(1) a pair; half of the n² pairs remain",
    source="Vaswani et al. 2017, section 3.2.3",
)
@dataclass(frozen=True)
class Causal:
    """No look ahead."""

    options: spec.Causal

    def pattern(self, surplus: int, keys: int) -> Pattern:
        """Return one band up to the aligned diagonal."""
        return Band(high=surplus if self.options.align == "bottom_right" else 0)


@MASKS.register(
    spec.SlidingWindow,
    formula="p − left ≤ j ≤ p + right",
    gradient=_GRADIENT,
    cost="O(1) a pair; n·(left + right + 1) pairs remain",
    source="Beltagy et al. 2020, section 3.1",
)
@dataclass(frozen=True)
class SlidingWindow:
    """The neighbourhood of the diagonal."""

    options: spec.SlidingWindow

    def pattern(self, surplus: int, keys: int) -> Pattern:
        """Return one band."""
        left = self.options.left
        return Band(low=None if left is None else -left, high=self.options.right)


@MASKS.register(
    spec.GlobalTokens,
    formula="p ∈ positions or j ∈ positions",
    gradient=_GRADIENT,
    cost="O(1) a pair; 2·n·g pairs remain for g positions",
    source="Beltagy et al. 2020, section 3.1",
)
@dataclass(frozen=True)
class GlobalTokens:
    """A cross of rows and columns for each position."""

    options: spec.GlobalTokens

    def pattern(self, surplus: int, keys: int) -> Pattern:
        """Return the union of marked queries and marked keys."""
        positions = tuple(self.options.positions)
        return AnyOf((Queries(positions), Keys(positions)))


@MASKS.register(
    spec.PrefixLM,
    formula="j < length or j ≤ p",
    gradient=_GRADIENT,
    cost="O(1) a pair; half of the n² pairs remain, plus half of the prefix's",
    source="Raffel et al. 2020, section 3.2.1",
)
@dataclass(frozen=True)
class PrefixLM:
    """Causal beyond a prefix that every query sees."""

    options: spec.PrefixLM

    def pattern(self, surplus: int, keys: int) -> Pattern:
        """Return the union of the first keys and a causal band."""
        return AnyOf((Leading(self.options.length), Band(high=0)))


@MASKS.register(
    spec.Block,
    formula="|⌊j/size⌋ − ⌊p/size⌋| ≤ neighbours",
    gradient=_GRADIENT,
    cost="O(1) a pair; n·size·(2·neighbours + 1) pairs remain",
    source="Child et al. 2019, section 4.3",
)
@dataclass(frozen=True)
class Block:
    """Blocks along the diagonal."""

    options: spec.Block

    def pattern(self, surplus: int, keys: int) -> Pattern:
        """Return the query's block and its neighbours."""
        return Blocks(self.options.size, self.options.neighbours)


@MASKS.register(
    spec.Strided,
    formula="|p − j| ≤ local or (p − j) mod stride = 0",
    gradient=_GRADIENT,
    cost="O(1) a pair; n·(2·local + n/stride) pairs remain",
    source="Child et al. 2019, section 4.3",
)
@dataclass(frozen=True)
class Strided:
    """A neighbourhood and stripes beside the diagonal."""

    options: spec.Strided

    def pattern(self, surplus: int, keys: int) -> Pattern:
        """Return the union of a band and every ``stride``-th diagonal."""
        local = self.options.stride if self.options.local is None else self.options.local
        return AnyOf((Band(-local, local), Stripes(self.options.stride)))


@MASKS.register(
    spec.FixedStride,
    formula="⌊j/stride⌋ = ⌊p/stride⌋ or j mod stride ≥ stride − summary",
    gradient=_GRADIENT,
    cost="O(1) a pair; n·(stride + n·summary/stride) pairs remain",
    source="Child et al. 2019, section 4.3",
)
@dataclass(frozen=True)
class FixedStride:
    """Blocks along the diagonal and columns at the ends of blocks."""

    options: spec.FixedStride

    def pattern(self, surplus: int, keys: int) -> Pattern:
        """Return the union of the query's block and the end of every block."""
        stride, summary = self.options.stride, self.options.summary
        return AnyOf((Blocks(stride), Remainder(stride, stride - summary)))


@MASKS.register(
    spec.RandomBlocks,
    formula="⌊j/size⌋ ∈ draw(seed, ⌊p/size⌋, ⌈keys/size⌉), count blocks",
    gradient=_GRADIENT,
    cost="O(count) a pair; n·size·count pairs remain",
    source="Zaheer et al. 2020, section 2",
)
@dataclass(frozen=True)
class RandomBlocks:
    """Random blocks of keys for each block of queries."""

    options: spec.RandomBlocks

    def pattern(self, surplus: int, keys: int) -> Pattern:
        """Return blocks drawn among the blocks of all keys."""
        return DrawnBlocks(self.options.size, self.options.count, self.options.seed, -(-keys // self.options.size))


@MASKS.register(
    spec.Documents,
    formula="p and j lie between the same two ends, ends = cumulative lengths",
    gradient=_GRADIENT,
    cost="O(log documents) a query and key; Σ length² pairs remain",
    source="Krell et al. 2021 (packing without cross-contamination)",
)
@dataclass(frozen=True)
class Documents:
    """Blocks of any lengths along the diagonal."""

    options: spec.Documents

    def pattern(self, surplus: int, keys: int) -> Pattern:
        """Return segments that begin where a document begins, and where the last one ends."""
        return Segments((0, *accumulate(self.options.lengths)))


@MASKS.register(
    spec.AnyOf,
    formula="at least one of the masks allows (p, j)",
    gradient=_GRADIENT,
    cost="the sum of its masks",
    source="Beltagy et al. 2020, figure 2d (a window with global tokens)",
)
@dataclass(frozen=True)
class Union:
    """The union of several masks."""

    options: spec.AnyOf

    def pattern(self, surplus: int, keys: int) -> Pattern:
        """Return the union of their patterns."""
        return AnyOf(tuple(MASKS.of(mask).pattern(surplus, keys) for mask in self.options.of))


@MASKS.register(
    spec.AllOf,
    formula="each of the masks allows (p, j)",
    gradient=_GRADIENT,
    cost="the sum of its masks",
    source="Child et al. 2019, section 4.3 (a sparse pattern and a causal one)",
)
@dataclass(frozen=True)
class Intersection:
    """The intersection of several masks."""

    options: spec.AllOf

    def pattern(self, surplus: int, keys: int) -> Pattern:
        """Return the intersection of their patterns."""
        return AllOf(tuple(MASKS.of(mask).pattern(surplus, keys) for mask in self.options.of))


def pattern_of(masks: Sequence[spec.Mask], queries: int, keys: int, past: int = 0) -> Pattern:
    """Combine the masks into one pattern."""
    patterns = [MASKS.of(mask).pattern(keys - past - queries, keys) for mask in masks]
    return patterns[0] if len(patterns) == 1 else AllOf(tuple(patterns))


def causal_offset(masks: Sequence[spec.Mask], queries: int, keys: int, past: int = 0) -> int | None:
    """Return the r for which the masks allow the keys up to p + r, and no others; None for other masks and for none."""
    band = pattern_of(masks, queries, keys, past)
    return band.high if isinstance(band, Band) and band.low is None else None


def band_of(masks: Sequence[spec.Mask], queries: int, keys: int, past: int = 0) -> Band | None:
    """Return the band that all masks together allow, for queries at 0, 1, … after their past; None for other masks.

    A limit that hides nothing is left out.
    """
    parts = pattern_of(masks, queries, keys, past)
    bands = parts.of if isinstance(parts, AllOf) else (parts,)
    lows: list[int] = []
    highs: list[int] = []
    for band in bands:
        if not isinstance(band, Band):
            return None
        lows += [] if band.low is None or band.low + past <= 1 - queries else [band.low + past]
        highs += [] if band.high is None or band.high + past >= keys - 1 else [band.high + past]
    return Band(max(lows, default=None), min(highs, default=None))


def allowed(
    masks: Sequence[spec.Mask],
    queries: int,
    keys: int,
    *,
    past: int = 0,
    offsets: Tensor | None = None,
    rows: Tensor | None = None,
    spans: Sequence[Span] | None = None,
    device: torch.device | str = "cpu",
) -> Tensor | None:
    """Lay out all masks together: bool ``[1 or B, 1, Q or len(rows), K]``; None without masks.

    offsets ``[B]`` or ``[]``, by default the past; rows: the indices of the queries to answer for, by default all;
    spans: the keys, by default all.
    """
    if not masks:
        return None
    index = torch.arange(queries, device=device) if rows is None else rows.to(device)
    shift = (
        torch.full((), past, device=device)
        if offsets is None
        else offsets.to(device).long().clamp(-MAX_POSITION, MAX_POSITION)
    )
    p = index.view(1, 1, -1, 1) + shift.view(-1, 1, 1, 1)  # [1 or B, 1, Q, 1]
    pattern = pattern_of(masks, queries, keys, past)
    every = (Span(0, keys),) if spans is None else spans
    masked = [span for span in every if span.masked or len(every) > MANY]
    j = places(masked, p.device).view(1, 1, 1, -1)  # [1, 1, 1, K]
    shape = p.shape[0], 1, p.shape[2]
    together = pattern.allows(p, j).expand(*shape, j.shape[-1])  # of all spans at once: a small one takes as long
    if len(masked) == len(every):
        return together
    some = iter(together.split_with_sizes([len(span) for span in masked], -1))
    whole = torch.ones((), dtype=torch.bool, device=device)
    return torch.cat([next(some) if span.masked else whole.expand(*shape, len(span)) for span in every], -1)

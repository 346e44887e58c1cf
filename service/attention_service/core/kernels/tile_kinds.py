"""The blocked kernel on meta tensors: one tile of each kind stands for all that are alike.

Left out is the search for tiles, which a host does. Taken as known: a request's mask is as long as the keys, padding
hides no whole cell of tiles but for the keys that no sequence has, and sequences at other places have the tiles of the
last past key.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from attention_service.core.blocks import REPEATED
from attention_service.core.extent import Extent
from attention_service.core.kernels.hiding import Likeness, Limits
from attention_service.core.kernels.tiles import Group, places, scored_in
from attention_service.core.kernels.tiling import Block, Layout, Strip, Tiling
from attention_service.core.kernels.touched import tiling_of
from attention_service.core.masks import pattern_of
from attention_service.core.patterns import Pattern
from attention_service.core.types import Problem

_PASSES = 2
"""Groups of sequences that are told apart; the second finds the limits that the first one left."""


@dataclass(frozen=True)
class _TileKind:
    """A tile by everything on which its operations depend."""

    queries: int
    widths: tuple[int, ...]
    """Widths of the disjoint stretches of keys, ascending."""
    masked: tuple[tuple[int, bool], ...]
    """For each masked piece: its keys, and whether its limits are laid out anew."""
    added: bool
    """True if its keys include keys that the spec adds."""


@dataclass(frozen=True)
class _Tile:
    """A tile that stands for others of its kind."""

    start: int
    stop: int
    strip: Strip | None
    """None for a block that looks nowhere."""
    fresh: frozenset[tuple[int, int]]
    """The keys of those of its pieces whose limits are laid out anew."""


@dataclass
class _Kinds:
    """Blocks whose first tiles are of one kind: how many there are, and how many of each kind follow the first."""

    tile: _Tile
    count: int
    following: dict[_TileKind, tuple[_Tile, int]]


class OneOfEach:
    """The blocks with a tile of each kind, in place of all blocks."""

    def __init__(self, sizes: Extent) -> None:
        self._sizes = sizes

    def __call__(self, problem: Problem, *, whole_rows: bool) -> Iterator[tuple[Group, Block]]:
        """Yield each block within ``REPEATED``, as often as there are blocks of its kind."""
        sizes, fitted = self._sizes, tiling_of(self._sizes)
        if not sizes.batch or not sizes.queries:
            return
        with _disable_current_modes():  # tiles are found by real numbers
            at_once = min(sizes.batch, places(problem, fitted)[1])
            kinds = _kinds_of(_layout(sizes), fitted, whole_rows)
        groups, rest = divmod(sizes.batch, at_once)
        again = int(not sizes.batched_offsets)  # at other places nothing looks as before
        parts = [(at_once, 1, 0)] * (groups > 0) + [(at_once, groups - 1, again)] * (groups > 1)
        parts += [(rest, 1, again if groups else 0)] * (rest > 0)
        pattern = pattern_of(problem.spec.masks, problem.q.shape[2], problem.keys, problem.past)
        for size, times, turn in parts:
            limits = _CountedLimits(pattern, problem)
            with REPEATED.get()(times):
                group = Group(problem, slice(0, size), sizes.past, limits, pattern)
                group.met()
                for each in kinds[turn]:
                    yield from _block(group, each, limits)


def _block(group: Group, kinds: _Kinds, limits: "_CountedLimits") -> Iterator[tuple[Group, Block]]:
    limits.fresh = kinds.tile.fresh
    with REPEATED.get()(kinds.count):
        strips = () if kinds.tile.strip is None else _Strips(kinds, limits)
        yield group, Block(kinds.tile.start, kinds.tile.stop, strips)


class _Strips(tuple[Strip]):
    """The strips of a block: its first, then one of each kind that follows, as often as there are of them."""

    _told: list[tuple[_Tile, Fraction]]
    _limits: "_CountedLimits"

    def __new__(cls, kinds: _Kinds, limits: "_CountedLimits") -> "_Strips":
        following = ((tile, Fraction(count, kinds.count)) for tile, count in kinds.following.values())
        told = [(kinds.tile, Fraction(1)), *following]
        self = super().__new__(cls, [tile.strip for tile, _ in told if tile.strip is not None])
        self._told, self._limits = told, limits
        return self

    def __iter__(self) -> Iterator[Strip]:
        for tile, each in self._told:
            if tile.strip is not None:
                self._limits.fresh = tile.fresh
                with REPEATED.get()(each):
                    yield tile.strip


class _CountedLimits(Limits):
    """Limits of tiles: known before, but for those that are laid out anew."""

    def __init__(self, pattern: Pattern, problem: Problem) -> None:
        super().__init__(pattern, scored_in(problem), problem.q.device, 0)
        self.fresh: frozenset[tuple[int, int]] = frozenset()
        self._like = problem.q.new_empty((), dtype=scored_in(problem))

    def of(self, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        """``[queries, keys]``."""
        if keys in self.fresh:
            return self._laid_out(queries, keys)
        return self._like.new_empty(queries[1] - queries[0], keys[1] - keys[0])


def _layout(sizes: Extent) -> Layout:
    pattern = pattern_of(sizes.spec.masks, sizes.queries, sizes.told_keys, sizes.past)
    real = None if sizes.met_keys == sizes.told_keys else torch.arange(sizes.told_keys) < sizes.met_keys
    return Layout(pattern, sizes.past, sizes.queries, sizes.told_keys, sizes.extra, real)


@lru_cache(maxsize=64)
def _kinds_of(layout: Layout, tiling: Tiling, rows_whole: bool) -> tuple[list[_Kinds], ...]:
    """The blocks of the first group of sequences, and those of each other."""
    likeness = Likeness(layout.pattern, tiling.largest)
    return tuple(_kinds_of_group(layout, tiling, likeness, rows_whole) for _ in range(_PASSES))


def _kinds_of_group(layout: Layout, tiling: Tiling, likeness: Likeness, rows_whole: bool) -> list[_Kinds]:
    found: dict[_TileKind, _Kinds] = {}
    for block in layout.blocks(tiling, whole_rows=rows_whole):
        first = True
        for strip in block.strips or (None,):
            kind, tile = _kind_of(block, strip, layout, likeness)
            if first:
                own = found.setdefault(kind, _Kinds(tile, 0, {}))
                own.count += 1
            else:
                alike, count = own.following.get(kind, (tile, 0))
                own.following[kind] = alike, count + 1
            first = False
    return [*found.values()]


def _kind_of(block: Block, strip: Strip | None, layout: Layout, likeness: Likeness) -> tuple[_TileKind, _Tile]:
    rows = block.stop - block.start
    if strip is None:
        return _TileKind(rows, (), (), added=False), _Tile(block.start, block.stop, None, frozenset())
    masked, fresh = [], set()
    queries = block.start + layout.first, block.stop + layout.first
    for piece in strip.pieces:
        if piece.masked:
            keys = piece.start, piece.stop
            _, new, _ = likeness.remember(queries, keys)
            masked.append((piece.stop - piece.start, new))
            if new:
                fresh.add(keys)
    spans = strip.spans
    kind = _TileKind(
        rows, tuple(sorted(stop - start for start, stop in spans)), tuple(sorted(masked)), spans[-1][1] > layout.keys
    )
    return kind, _Tile(block.start, block.stop, strip, frozenset(fresh))

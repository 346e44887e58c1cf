"""The blocked kernel on meta tensors: one tile of each kind stands for all that are alike.

Left out is the search for tiles, which a host does. Taken as known: a request's mask is as long as the keys, padding
hides no whole cell of tiles but for the keys that no sequence has, and sequences at other places have the tiles of the
last past key.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from attention_service.core.blocks import REPEATED
from attention_service.core.kernels.extent import Extent
from attention_service.core.kernels.hiding import Likeness, Limits
from attention_service.core.kernels.tiles import Group, places, scored_in
from attention_service.core.kernels.tiling import Block, Layout, Strip, Tiling
from attention_service.core.kernels.touched import tiling_of
from attention_service.core.masks.pattern import Pattern
from attention_service.core.masks.rules import pattern_of
from attention_service.core.problem import Problem

_PASSES = 2
"""Groups of sequences that are told apart; the second finds the limits that the first one left."""
_MOST_DRAWN = 16
"""Kinds of blocks that are gone through where keys are drawn at random."""


@dataclass(frozen=True)
class _TileKind:
    """A tile by everything on which its operations depend."""

    queries: int
    widths: tuple[int, ...]
    """Widths of the disjoint stretches of keys, ascending."""
    masked: tuple[int, ...]
    """The keys of each masked piece."""
    added: bool
    """True if its keys include keys that the spec adds."""


@dataclass(frozen=True)
class _Tile:
    """A tile that stands for others of its kind."""

    start: int
    stop: int
    strip: Strip | None
    """None for a block that looks nowhere."""


@dataclass
class _Kinds:
    """Blocks whose first tiles are of one kind: how many there are, and how many of each kind follow the first."""

    tile: _Tile
    count: Fraction
    following: dict[_TileKind, tuple[_Tile, Fraction]]


@dataclass
class _Found:
    """The tiles of one group of sequences."""

    kinds: list[_Kinds]
    laid_out: Counter[tuple[int, int]]
    """Number of limits of so many queries and keys that are laid out anew."""


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
            found = _kinds_of(_layout(sizes), fitted, whole_rows)
        groups, rest = divmod(sizes.batch, at_once)
        again = int(not sizes.batched_offsets)  # at other places nothing looks as before
        parts = [(at_once, 1, 0)] * (groups > 0) + [(at_once, groups - 1, again)] * (groups > 1)
        parts += [(rest, 1, again if groups else 0)] * (rest > 0)
        pattern = pattern_of(problem.spec.masks, problem.q.shape[2], problem.keys, problem.past)
        for size, times, turn in parts:
            limits = _KnownLimits(pattern, problem)
            with REPEATED.get()(times):
                group = Group(problem, slice(0, size), sizes.past, limits, pattern)
                group.met()
                limits.lay_out(found[turn].laid_out)
                for each in found[turn].kinds:
                    yield from _block(group, each)


def _block(group: Group, kinds: _Kinds) -> Iterator[tuple[Group, Block]]:
    with REPEATED.get()(kinds.count):
        strips = () if kinds.tile.strip is None else _Strips(kinds)
        yield group, Block(kinds.tile.start, kinds.tile.stop, strips)


class _Strips(tuple[Strip]):
    """The strips of a block: its first, then one of each kind that follows, as often as there are of them."""

    _told: list[tuple[_Tile, Fraction]]

    def __new__(cls, kinds: _Kinds) -> "_Strips":
        following = ((tile, count / kinds.count) for tile, count in kinds.following.values())
        told = [(kinds.tile, Fraction(1)), *following]
        self = super().__new__(cls, [tile.strip for tile, _ in told if tile.strip is not None])
        self._told = told
        return self

    def __iter__(self) -> Iterator[Strip]:
        for tile, each in self._told:
            if tile.strip is not None:
                with REPEATED.get()(each):
                    yield tile.strip


class _KnownLimits(Limits):
    """Limits of tiles that are all known: those that are laid out anew are laid out together before."""

    def __init__(self, pattern: Pattern, problem: Problem) -> None:
        super().__init__(pattern, scored_in(problem), problem.q.device, 0)
        self._like = problem.q.new_empty((), dtype=scored_in(problem))

    def lay_out(self, sizes: Mapping[tuple[int, int], int]) -> None:
        """Lay out one of each size, as often as there are of it: its operations depend on its size alone."""
        for (queries, keys), times in sizes.items():
            with REPEATED.get()(times):
                self._laid_out((0, queries), (0, keys))

    def of(self, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        """``[queries, keys]``."""
        return self._like.new_empty(queries[1] - queries[0], keys[1] - keys[0])


def _layout(sizes: Extent) -> Layout:
    pattern = pattern_of(sizes.spec.masks, sizes.queries, sizes.sequence_keys, sizes.past)
    real = (
        None if sizes.unpadded_keys == sizes.sequence_keys else torch.arange(sizes.sequence_keys) < sizes.unpadded_keys
    )
    return Layout(pattern, sizes.past, sizes.queries, sizes.sequence_keys, sizes.added_keys, real)


@lru_cache(maxsize=64)
def _kinds_of(layout: Layout, tiling: Tiling, rows_whole: bool) -> tuple[_Found, ...]:
    """The blocks of the first group of sequences, and those of each other."""
    likeness = Likeness(layout.pattern, tiling.largest)
    return tuple(_kinds_of_group(layout, tiling, likeness, rows_whole) for _ in range(_PASSES))


def _kinds_of_group(layout: Layout, tiling: Tiling, likeness: Likeness, rows_whole: bool) -> _Found:
    found: dict[_TileKind, _Kinds] = {}
    laid_out: Counter[tuple[int, int]] = Counter()
    for block in layout.blocks(tiling, whole_rows=rows_whole):
        rows, queries = block.stop - block.start, (block.start + layout.first, block.stop + layout.first)
        own: _Kinds | None = None
        for strip in block.strips or (None,):
            for piece in (piece for piece in (strip.pieces if strip else ()) if piece.masked):
                _, new, _ = likeness.remember(queries, (piece.start, piece.stop))
                laid_out[rows, piece.stop - piece.start] += new
            kind, tile = _kind_of(rows, strip, layout), _Tile(block.start, block.stop, strip)
            if own is None:
                own = found.setdefault(kind, _Kinds(tile, Fraction(0), {}))
                own.count += 1
            else:
                alike, count = own.following.get(kind, (tile, Fraction(0)))
                own.following[kind] = alike, count + 1
    drawn = any(part.turns.period is None for part in layout.pattern.parts())
    return _Found(_some([*found.values()]) if drawn else [*found.values()], +laid_out)


def _some(kinds: list[_Kinds]) -> list[_Kinds]:
    """Return a few blocks that stand for all: with keys drawn at random, the tiles of each are of other kinds."""
    few = kinds[:: -(-len(kinds) // _MOST_DRAWN) or 1]
    more = Fraction(sum(each.count for each in kinds), sum(each.count for each in few) or 1)
    return [
        _Kinds(each.tile, each.count * more, {kind: (tile, n * more) for kind, (tile, n) in each.following.items()})
        for each in few
    ]


def _kind_of(rows: int, strip: Strip | None, layout: Layout) -> _TileKind:
    if strip is None:
        return _TileKind(rows, (), (), added=False)
    spans = strip.spans
    masked = tuple(sorted(piece.stop - piece.start for piece in strip.pieces if piece.masked))
    widths = tuple(sorted(stop - start for start, stop in spans))
    return _TileKind(rows, widths, masked, spans[-1][1] > layout.keys)

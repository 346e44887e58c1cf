"""Kernels that run on meta tensors under an operation counter; one tile of each kind stands for all that are alike.

Left out is the search for tiles, which a host does. Taken as known: a request's mask is as long as the keys, padding
hides no whole cell of tiles but for the keys that no sequence has, and sequences at other places have the tiles of the
last past key.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from attention_service.core.kernels.base import Kernel
from attention_service.core.kernels.blocked import Blocked
from attention_service.core.kernels.hiding import Likeness, Limits
from attention_service.core.kernels.tiles import Group, places, scored_in
from attention_service.core.kernels.tiling import Block, Layout, Strip, Tiling
from attention_service.core.kernels.touched import by_fused, tiling_of
from attention_service.core.masks import pattern_of
from attention_service.core.patterns import Pattern
from attention_service.core.types import Problem
from attention_service.cost.kernels import kernel_of
from attention_service.cost.operation_counter import OperationCounter
from attention_service.cost.workload import Workload

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_PASSES = 2
"""Groups of sequences that are told apart; the second finds the limits that the first one left."""


def counted_kernel(work: Workload, kernel: str, counter: OperationCounter) -> str | Kernel:
    """A kernel that starts the operations of the real one; the name of one that consists of plain operations."""
    match kernel_of(work, kernel).holds:
        case "masks":
            return kernel_of(work, kernel).rehearsal(work)
        case "tiles":
            return Blocked(partial(_one_of_each, work, counter), in_blocks=by_fused(work))
        case _:
            return kernel


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


def _one_of_each(
    work: Workload, counter: OperationCounter, problem: Problem, *, whole_rows: bool
) -> Iterator[tuple[Group, Block]]:
    fitted = tiling_of(work)
    if not work.batch or not work.queries:
        return
    with _disable_current_modes():  # tiles are found by real numbers
        at_once = min(work.batch, places(problem, fitted)[1])
        kinds = _kinds_of(_layout(work), fitted, whole_rows)
    groups, rest = divmod(work.batch, at_once)
    again = int(not work.batched_offsets)  # at other places nothing looks as before
    sizes = [(at_once, 1, 0)] * (groups > 0) + [(at_once, groups - 1, again)] * (groups > 1)
    sizes += [(rest, 1, again if groups else 0)] * (rest > 0)
    pattern = pattern_of(problem.spec.masks, problem.q.shape[2], problem.keys, problem.past)
    outside = counter.times
    for size, times, turn in sizes:
        limits = _CountedLimits(pattern, problem)
        counter.times = outside * times
        group = Group(problem, slice(0, size), work.past, limits, pattern)
        group.met()
        for each in kinds[turn]:
            counter.times = outside * times * each.count
            limits.fresh = each.tile.fresh
            strips = () if each.tile.strip is None else _Strips(each, limits, counter, outside * times)
            yield group, Block(each.tile.start, each.tile.stop, strips)
    counter.times = outside


class _Strips(tuple[Strip]):
    """The strips of a block: its first, then one of each kind that follows."""

    _told: list[tuple[_Tile, int]]
    _limits: "_CountedLimits"
    _counter: OperationCounter
    _times: int

    def __new__(cls, kinds: _Kinds, limits: "_CountedLimits", counter: OperationCounter, times: int) -> "_Strips":
        tiles = [kinds.tile, *(tile for tile, _ in kinds.following.values())]
        self = super().__new__(cls, [tile.strip for tile in tiles if tile.strip is not None])
        counts = [kinds.count, *(count for _, count in kinds.following.values())]
        self._told = [*zip(tiles, counts, strict=True)]
        self._limits, self._counter, self._times = limits, counter, times
        return self

    def __iter__(self) -> Iterator[Strip]:
        before = self._counter.times
        for tile, count in self._told:
            if tile.strip is not None:
                self._limits.fresh = tile.fresh
                self._counter.times = self._times * count
                yield tile.strip
        self._counter.times = before


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


def _layout(work: Workload) -> Layout:
    pattern = pattern_of(work.spec.masks, work.queries, work.told_keys, work.past)
    real = None if work.met_keys == work.told_keys else torch.arange(work.told_keys) < work.met_keys
    return Layout(pattern, work.past, work.queries, work.told_keys, work.extra, real)


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

"""The blocks and tiles that the blocked kernel computes, counted from positions alone."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from attention_service.core.kernels import tiling
from attention_service.core.kernels.extent import Extent
from attention_service.core.kernels.fused import cpu_blocks
from attention_service.core.kernels.tiling import Layout, Tiling
from attention_service.core.masks import pair_count
from attention_service.core.masks.rules import pattern_of
from attention_service.core.normalizers import NORMALIZERS, has_lse

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
_MOST_CELLS = 2**20
"""Beyond so many the tiles are not looked at one by one, but estimated."""
_SAMPLES = 16
_CELLS_OF_A_BLOCK = 2**14


@dataclass(frozen=True)
class Touched:
    """The part of an attention that the blocked kernel computes."""

    pairs: int
    """Query-key pairs of one head over the batch."""
    blocks: int
    """Blocks of queries, over all groups of sequences."""
    strips: int
    """Tiles, over all groups of sequences."""
    widest: int
    """The most keys that a block looks at."""


@lru_cache(maxsize=1024)
def by_fused(sizes: Extent) -> bool:
    """Return True if the blocked kernel gives its blocks to the fused one (``kernels.fused.cpu_blocks``)."""
    own = sizes.request_mask_elements or sizes.padded or sizes.dropped
    if sizes.threads == 0 or own:
        return False
    return cpu_blocks.takes_spec(sizes.spec, _DTYPES[sizes.itemsize], sizes.queries, sizes.sequence_keys, sizes.past)


@lru_cache(maxsize=1024)
def whole_rows(sizes: Extent) -> bool:
    """Return True if all keys of a block are one strip: a query's weights need all its scores at once."""
    if by_fused(sizes):
        return True
    normalizer = NORMALIZERS.of(sizes.spec.normalizer)
    return not has_lse(sizes.spec.normalizer) and not normalizer.separable


@lru_cache(maxsize=1024)
def tiling_of(sizes: Extent) -> Tiling:
    """The sizes of blocks and strips."""
    if by_fused(sizes):
        return tiling.WHOLE.whole(sizes.queries)
    return tiling.TILING.fitted(sizes.heads, sizes.queries, sizes.keys)


def sequences(sizes: Extent, fitted: Tiling) -> int:
    """Count the sequences that are looked at together."""
    return 1 if sizes.batched_offsets and sizes.spec.masks else max(1, min(sizes.batch, fitted.sequences(sizes.keys)))


@lru_cache(maxsize=1024)
def touched(sizes: Extent) -> Touched:
    """Count what the blocked kernel computes at the offset P, without keys known to be padding in all sequences."""
    return touched_at(sizes, sizes.past)


def touched_at(sizes: Extent, first: int) -> Touched:
    """Count the same where the first query of every sequence is at this position."""
    fitted = tiling_of(sizes)
    groups = -(-sizes.batch // sequences(sizes, fitted))
    pattern = pattern_of(sizes.spec.masks, sizes.queries, sizes.sequence_keys, sizes.past)
    layout = Layout(pattern, first, sizes.queries, sizes.unpadded_keys, sizes.added_keys)
    cells = -(-sizes.queries // fitted.queries) * (-(-sizes.unpadded_keys // fitted.cell) if sizes.spec.masks else 1)
    count = _counted if cells <= _MOST_CELLS else _estimated
    one = count(layout, fitted, whole_rows(sizes))
    return Touched(sizes.batch * one.pairs, groups * one.blocks, groups * one.strips, one.widest)


@lru_cache(maxsize=64)  # one account of costs asks for the same several times
def _counted(layout: Layout, fitted: Tiling, rows_whole: bool) -> Touched:
    """Count one sequence block by block."""
    dense = layout.pattern == pattern_of((), layout.queries, layout.keys)
    blocks = -(-layout.queries // fitted.queries)
    widths = np.full(blocks, layout.keys + layout.extra) if dense else layout.widths(fitted)
    rows = np.full(len(widths), fitted.queries)
    rows[-1:] = layout.queries - fitted.queries * (len(widths) - 1)
    pairs, widest = int((widths * rows).sum()), int(widths.max(initial=0))
    if rows_whole:
        blocks = int(np.ceil(rows / np.maximum(1, fitted.scores // np.maximum(widths, 1))).sum())
        return Touched(pairs, blocks, blocks, widest)
    return Touched(pairs, len(widths), int(np.ceil(widths / fitted.keys).sum()), widest)


@lru_cache(maxsize=64)
def _estimated(layout: Layout, fitted: Tiling, rows_whole: bool) -> Touched:
    """Estimate one sequence: the allowed pairs with the rest of their tiles, or an extrapolation of a few blocks."""
    blocks, keys = -(-layout.queries // fitted.queries), layout.keys + layout.extra
    if pair_count.countable(layout.pattern):
        allowed = pair_count.count(layout.pattern, layout.first, layout.queries, layout.keys)
        width = allowed / layout.queries + fitted.queries + fitted.cell + layout.extra
    else:
        width = _sampled_width(layout, fitted)
    pairs = min(layout.queries * keys, round(layout.queries * width))
    if rows_whole:
        blocks = max(blocks, -(-pairs // max(1, fitted.scores)))
        return Touched(pairs, blocks, blocks, keys)
    return Touched(pairs, blocks, max(blocks, -(-pairs // (fitted.queries * fitted.keys))), keys)


def _sampled_width(layout: Layout, fitted: Tiling) -> float:
    """The keys that a block looks at, on average over a few, by cells so large that there are not many."""
    coarse = replace(fitted, cell=max(fitted.cell, -(-layout.keys // _CELLS_OF_A_BLOCK)))
    starts = {index * layout.queries // _SAMPLES // fitted.queries * fitted.queries for index in range(_SAMPLES)}
    parts = (replace(layout, first=layout.first + start, queries=fitted.queries) for start in starts)
    return float(np.mean([part.widths(coarse)[0] for part in parts]))

"""What the blocked kernel goes through: counted from positions alone, as it will do it."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from attention_service.core import counting
from attention_service.core.kernels import fused_blocks, tiling
from attention_service.core.kernels.tiling import Layout, Tiling
from attention_service.core.masks import pattern_of
from attention_service.core.normalizers import NORMALIZERS, has_lse
from attention_service.cost.workload import Workload, once

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
_MOST_CELLS = 2**20
"""Beyond so many the tiles are not looked at one by one, but estimated."""
_SAMPLES = 16
_CELLS_OF_A_BLOCK = 2**14


@dataclass(frozen=True)
class Touched:
    """How much of an attention the blocked kernel computes."""

    pairs: int
    """Query-key pairs of one head over the batch."""
    blocks: int
    """Blocks of queries, over all groups of sequences."""
    strips: int
    """Tiles, over all groups of sequences."""
    widest: int
    """The most keys that a block looks at."""


def counted_as(kernel: str) -> str:
    """The kernel whose cost stands for that of another: flex skips what the blocked one does, and is never slower.

    The two being equal to the planner, flex is taken only where a request asks for it.
    """
    return "blocked" if kernel == "flex" else kernel


@once
def by_fused(work: Workload) -> bool:
    """Whether the blocked kernel gives its blocks to the fused one (``kernels.fused_blocks``)."""
    own = work.request_mask_elements or work.padded or work.dropped
    if work.threads == 0 or own:
        return False
    return fused_blocks.takes_spec(work.spec, _DTYPES[work.itemsize], work.queries, work.told_keys, work.past)


@once
def whole_rows(work: Workload) -> bool:
    """Whether all keys of a block are one strip: a query's weights need all its scores at once."""
    if by_fused(work):
        return True
    normalizer = NORMALIZERS.of(work.spec.normalizer)
    return not has_lse(work.spec.normalizer) and not normalizer.separable


@once
def tiling_of(work: Workload) -> Tiling:
    """The sizes of blocks and strips."""
    if by_fused(work):
        return tiling.WHOLE.whole(work.queries)
    return tiling.TILING.fitted(work.heads, work.queries, work.keys)


def sequences(work: Workload, fitted: Tiling) -> int:
    """How many are looked at together."""
    return 1 if work.batched_offsets and work.spec.masks else max(1, min(work.batch, fitted.sequences(work.keys)))


@once
def touched(work: Workload) -> Touched:
    """What the blocked kernel goes through, at the offset P, without what is known to be padding in all sequences."""
    fitted = tiling_of(work)
    groups = -(-work.batch // sequences(work, fitted))
    pattern = pattern_of(work.spec.masks, work.queries, work.told_keys, work.past)
    layout = Layout(pattern, work.past, work.queries, work.met_keys, work.extra)
    cells = -(-work.queries // fitted.queries) * (-(-work.met_keys // fitted.cell) if work.spec.masks else 1)
    count = _counted if cells <= _MOST_CELLS else _estimated
    one = count(layout, fitted, whole_rows(work))
    return Touched(work.batch * one.pairs, groups * one.blocks, groups * one.strips, one.widest)


@lru_cache(maxsize=64)  # one account of costs asks for the same several times
def _counted(layout: Layout, fitted: Tiling, rows_whole: bool) -> Touched:
    """Of one sequence, block by block."""
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
    """Of one sequence: the allowed pairs and what is beside them in their tiles, or what a few blocks look at."""
    blocks, keys = -(-layout.queries // fitted.queries), layout.keys + layout.extra
    if counting.countable(layout.pattern):
        allowed = counting.count(layout.pattern, layout.first, layout.queries, layout.keys)
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

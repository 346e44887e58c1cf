"""Memory of one call of the fused kernel: what it is given beside q, k and v, and what it works in."""

from functools import cache

import torch

from attention_service.core.scores import SCORES
from attention_service.cost.pairs import score_cost
from attention_service.cost.workload import Workload

FUSED_KEYS = 512
"""Keys that PyTorch's CPU flash kernel takes at a time."""

_SCRATCH_ROW, _SCRATCH = 640, 5248
"""Bytes that oneDNN works in for a product of a tile in half types, for each query and besides; measured."""


def fused_context(work: Workload) -> int:
    """As the kernel makes it: on a CPU as wide as the queries."""
    wide = fused_width(work) if work.threads else work.value_dim
    return work.batch * work.heads * work.queries * wide * work.itemsize


def fused_width(work: Workload) -> int:
    """Of all arguments on a CPU: that of the values, or of what the score makes of queries and keys."""
    made = score_cost(work).query_width if fused_factors(work) else 0
    return max(made or work.head_dim, work.value_dim)


def lse_of(work: Workload) -> int:
    """The log-sum-exp of each query."""
    return work.batch * work.heads * work.queries * max(work.itemsize, 4)


def fused_factors(work: Workload) -> int:
    """What the score makes of queries and keys, for their product to be the score; a plain scale is passed on."""
    if getattr(SCORES.of(work.spec.score), "plain", False):
        return 0
    score = score_cost(work)
    queries, keys = work.batch * work.heads * work.queries, work.batch * work.kv_heads * work.keys
    return (queries * score.query_width + keys * score.key_width) * work.itemsize


def fused_workspace(work: Workload) -> int:
    """Log-sum-exp of each query, and a tile of scores and outputs for each thread.

    Source: PyTorch's CPU flash kernel, which takes 32, 64 (from 192 on) or 256 (from 768 on) queries and 512 keys at a
    time.
    """
    accumulate = max(work.itemsize, 4)
    lse = work.batch * work.heads * work.queries * accumulate
    if not work.threads:
        return lse
    keys, rows, wide = min(FUSED_KEYS, work.keys), tile_rows(work), fused_width(work)
    each = rows * (keys + 2 + wide) * accumulate
    if work.itemsize != 2:
        return lse + work.threads * each
    if not packed(work):
        return lse + work.threads * (each + rows * keys * 2)
    each += rows * _even(keys) * 2 + keys * wide * 2 + (rows * _even(wide) * 2 if wide % 2 else 0)
    whole, last = divmod(work.keys - 1, FUSED_KEYS)
    laid_out = work.keys * _even(wide) + (whole * _even(FUSED_KEYS) + _even(last + 1)) * wide
    return lse + work.threads * each + work.batch * work.kv_heads * laid_out * 2


def tile_rows(work: Workload) -> int:
    """Queries that PyTorch's CPU flash kernel takes at a time."""
    return min(256 if work.queries >= 768 else 64 if work.queries >= 192 else 32, work.queries)


def packed(work: Workload) -> bool:
    """Whether keys and values of half types are laid out as a processor with matrix instructions for them wants them.

    Source: PyTorch's CPU flash kernel, which does so unless there are few of them, or for bfloat16 few queries to each.
    """
    least = 16 if work.half else 64
    if work.itemsize != 2 or not work.threads or not _matrix_instructions():
        return False
    if min(work.queries, work.keys) < least:
        return False
    rows = tile_rows(work)
    tasks = work.batch * work.heads * -(-work.queries // rows)
    return work.half or -(-tasks // work.threads) * rows >= 4 * work.batch * work.kv_heads


@cache
def _matrix_instructions() -> bool:
    return torch.cpu._is_amx_tile_supported()


def _even(count: int) -> int:
    return count + count % 2


def fused_backward_workspace(work: Workload) -> int:
    """A tile of scores and one of their gradients for each thread; and what oneDNN works in for half types."""
    if not work.threads:
        return lse_of(work)
    rows, half = tile_rows(work), work.itemsize == 2
    each = 2 * rows * min(FUSED_KEYS, work.keys) * (max(work.itemsize, 4) + (2 if half else 0))
    return work.threads * (each + (_SCRATCH_ROW * rows + _SCRATCH if half else 0))

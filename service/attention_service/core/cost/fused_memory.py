"""Memory of one call of the fused kernel: what it is given beside q, k and v, and what it works in."""

from functools import cache

import torch

from attention_service.core.cost.held import Held
from attention_service.core.cost.pairs import Masks, fused_masks, score_cost
from attention_service.core.cost.phases import Ledger
from attention_service.core.cost.preparing_memory import Apart
from attention_service.core.cost.stages_memory import padded_bytes, visible
from attention_service.core.cost.workload import Workload
from attention_service.core.scores import SCORES

FUSED_KEYS = 512
"""Keys that PyTorch's CPU flash kernel takes at a time."""

_SCRATCH_ROW, _SCRATCH = 640, 5248
"""Bytes that oneDNN works in for a product of a tile in half types, for each query and besides; measured."""


def fused(ledger: Ledger, work: Workload) -> None:
    """From q, k and v to the context, which stays."""
    masks = fused_masks(work)
    if work.padded:
        ledger.hold(padding=padded_bytes(work))
    ledger.hold(factors=fused_factors(work))
    ledger.phase("factors", factors=_factors_making(work))
    given, passed = _mask(ledger, work, masks)
    ledger.hold(mask=given)
    ledger.hold(arguments=fused_arguments(work))
    context = fused_context(work)
    ledger.phase("attention", mask=passed - given, workspace=fused_workspace(work), context=context)
    if masks.any:
        zeroed = Held.of(work).context
        ledger.phase("attention", context=context + zeroed)
        ledger.hold(context=zeroed)
    else:
        ledger.hold(context=context)
    ledger.drop("padding", "factors", "mask", "arguments")


def fused_context(work: Workload) -> int:
    """As the kernel makes it: on a CPU as wide as the queries."""
    wide = fused_width(work) if work.threads else work.value_dim
    return work.batch * work.heads * work.queries * wide * work.itemsize


def fused_width(work: Workload) -> int:
    """Of all arguments on a CPU: that of the values, or of what the score makes of queries and keys."""
    made = score_cost(work).query_width if fused_factors(work) else 0
    return max(made or work.head_dim, work.value_dim)


def keeps_layout(work: Workload) -> bool:
    """Whether the context lies in memory as the queries of a projection do, with the heads of a token side by side."""
    plain = not fused_factors(work) and work.threads > 0
    return plain and Apart.of(work).q and not fused_masks(work).any and work.value_dim >= work.head_dim


def lse_of(work: Workload) -> int:
    """The log-sum-exp of each query."""
    return work.batch * work.heads * work.queries * max(work.itemsize, 4)


def _mask(ledger: Ledger, work: Workload, masks: Masks) -> tuple[int, int]:
    """The mask made: its bytes as it is given to the kernel, and with that in which the kernel reads it."""
    if not masks.any:
        return 0, 0
    e, seen = work.itemsize, visible(ledger, masks)
    if not masks.bias:
        together = masks.together
        ledger.phase("mask", mask=seen + together)
        # As floats; on a GPU, laid out in blocks of 16.
        return together, together + masks.combined * e * (1 if work.threads else 2)
    hidden = masks.combined * e if masks.together else 0
    ledger.phase("mask", mask=seen + hidden + masks.together)
    passed = masks.combined * (max(e, 4) if work.threads else e)
    tempered = masks.combined * max(e, 4) if work.spec.normalizer.temperature != 1 else 0
    size = max(e, 4) if tempered else e
    # Without blind queries, then cut off at the largest number, told apart from what forbids, and as it is passed.
    filled = masks.combined * size
    at_once = 3 * filled + masks.combined
    narrowed = 2 * filled + passed if passed != masks.combined * size else 0
    ledger.phase("mask", mask=seen + (tempered or hidden) + max(at_once, narrowed))
    return passed, passed + (0 if work.threads else masks.combined * e * 2)


def _factors_making(work: Workload) -> int:
    """While the second one is made: a copy on the way."""
    score = score_cost(work)
    if not fused_factors(work) or not score.key_width:
        return 0
    return work.batch * work.kv_heads * work.keys * work.head_dim * work.itemsize


def fused_factors(work: Workload) -> int:
    """What the score makes of queries and keys, for their product to be the score; a plain scale is passed on."""
    if getattr(SCORES.of(work.spec.score), "plain", False):
        return 0
    score = score_cost(work)
    queries, keys = work.batch * work.heads * work.queries, work.batch * work.kv_heads * work.keys
    return (queries * score.query_width + keys * score.key_width) * work.itemsize


def fused_arguments(work: Workload) -> int:
    """Copies of q, k and v, as the kernel takes them.

    On a CPU all are of one width; on a GPU it is a multiple of 8, with a key/value head for each query head.
    """
    wide = fused_width(work)
    queries, keys = work.batch * work.heads * work.queries, work.batch * work.kv_heads * work.keys
    total = 0
    if work.threads:
        width = (score_cost(work).query_width if fused_factors(work) else 0) or work.head_dim
        if width < wide:
            total += queries * wide + keys * wide
        if work.value_dim < wide:
            total += keys * wide
    else:
        expanded = work.batch * work.heads * work.keys
        if work.heads != work.kv_heads:
            total += expanded * (work.head_dim + work.value_dim)
        if work.itemsize == 2 and (work.head_dim % 8 or work.value_dim % 8):
            total += (queries + 2 * expanded) * (wide + 8)
    return total * work.itemsize


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

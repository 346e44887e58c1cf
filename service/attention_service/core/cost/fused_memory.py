"""Peak memory of one call of the fused kernel: what it is given beside q, k and v, and what it works in."""

from attention_service.core.cost.held import Held
from attention_service.core.cost.pairs import Masks, fused_masks, score_cost
from attention_service.core.cost.workload import Workload
from attention_service.core.scores import SCORES, Product


def fused_peak(work: Workload) -> int:
    """One call of the fused kernel, beyond q, k and v, its context included."""
    held = Held.of(work)
    masks = fused_masks(work)
    context = held.context * (2 if masks.any else 1)  # queries that look nowhere are zeroed in a copy
    padding = held.kv if work.padded else 0
    making, mask = fused_mask_bytes(work, masks)
    calling = mask + fused_factors(work) + fused_arguments(work) + context + fused_workspace(work) + _packed(work)
    return padding + max(making, calling)


def fused_context(work: Workload) -> int:
    """The context that is kept: on a CPU as wide as the queries, unless blind queries were zeroed in a copy of it."""
    wide = max(work.head_dim, work.value_dim) if work.threads and not fused_masks(work).any else work.value_dim
    return work.batch * work.heads * work.queries * wide * work.itemsize


def fused_mask_bytes(work: Workload, masks: Masks) -> tuple[int, int]:
    """The most that is held while the kernel's mask is made, and what is held of it while the kernel runs."""
    if not masks.any:
        return 0, 0
    e = work.itemsize
    converted = masks.combined * e * (1 if work.threads else 2)  # as floats; on a GPU, laid out in blocks of 16
    if not masks.bias:
        together = masks.together
        return max(masks.building, 2 * together + masks.spec), together + converted
    passed = masks.combined * (max(e, 4) if work.threads else e)
    making = masks.together * 2 + masks.combined * (4 * e + 1) + passed
    return max(masks.building, making), passed + (0 if work.threads else converted)


def fused_factors(work: Workload) -> int:
    """What the score makes of queries and keys, for their product to be the score; a plain scale is passed on."""
    made = SCORES.of(work.spec.score)
    if isinstance(made, Product) and made.plain:
        return 0
    score = score_cost(work)
    queries, keys = work.batch * work.heads * work.queries, work.batch * work.kv_heads * work.keys
    return (queries * score.query_width + keys * score.key_width) * work.itemsize


def fused_arguments(work: Workload) -> int:
    """Copies of q, k and v, as the kernel takes them.

    On a CPU all are of one width; on a GPU it is a multiple of 8, with a key/value head for each query head.
    """
    wide = max(work.head_dim, work.value_dim)
    queries, keys = work.batch * work.heads * work.queries, work.batch * work.kv_heads * work.keys
    total = 0
    if work.threads:
        if work.head_dim < wide:
            total += queries * wide + keys * wide
        if work.value_dim < wide:
            total += keys * wide + queries * wide  # the context is as wide as the values
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
    tile = 256 if work.queries >= 768 else 64 if work.queries >= 192 else 32
    keys = min(512, work.keys)
    each = (keys + 2 + max(work.head_dim, work.value_dim)) * accumulate + (keys * 2 if work.itemsize == 2 else 0)
    return lse + work.threads * min(tile, work.queries) * each


def _packed(work: Workload) -> int:
    """Keys and values of half types for each query head, as a processor with matrix instructions for them wants them.

    Source: PyTorch's CPU flash kernel, which does so unless there are few queries to share the work.
    """
    if work.itemsize != 2 or work.queries < work.threads or not work.threads:
        return 0
    return work.batch * work.heads * work.keys * (work.head_dim + work.value_dim) * work.itemsize

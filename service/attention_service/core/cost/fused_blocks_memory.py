"""Memory of the blocked kernel where PyTorch's fused one computes its blocks: results, and one block at a time."""

from dataclasses import replace

from attention_service.core.cost.blocked_memory import Tile, limits_of
from attention_service.core.cost.fused_memory import (
    fused_arguments,
    fused_backward_workspace,
    fused_context,
    fused_factors,
    fused_width,
    fused_workspace,
    packed_bytes,
)
from attention_service.core.cost.pairs import score_cost, score_itemsize
from attention_service.core.cost.phases import Ledger
from attention_service.core.cost.preparing_memory import Apart
from attention_service.core.cost.strips import few_cells, strips_of, widest_joined
from attention_service.core.cost.tiles import tiling_of
from attention_service.core.cost.workload import Workload
from attention_service.core.kernels.hiding import KEPT
from attention_service.core.kernels.tiling import Layout
from attention_service.core.masks import pattern_of


def fused_blocks(ledger: Ledger, work: Workload, *, graph: bool = False) -> None:
    """From q, k and v to the context and a returned log-sum-exp; ``graph``: with what autograd keeps."""
    ledger.hold(factors=fused_factors(work))
    score = score_cost(work)
    made = work.batch * work.kv_heads * work.keys * work.head_dim * work.itemsize
    ledger.phase("factors", factors=made if fused_factors(work) and score.key_width else 0)
    ledger.hold(arguments=fused_arguments(work))
    told = _sums(work) if "lse" in work.taps else 0
    ledger.hold(context=fused_context(work), graph=_sums(work), lse=told)
    of_block, working = _block(work)
    attended = of_block.batch * of_block.heads * of_block.queries * fused_width(work) * work.itemsize
    ledger.phase("context", tile=working, workspace=fused_workspace(of_block) + packed_bytes(of_block), block=attended)
    if not graph:
        ledger.drop("factors", "arguments", "graph")


def fused_blocks_backward(ledger: Ledger, work: Workload) -> None:
    """A sum for each gradient, and a block of each at a time."""
    width, wide = fused_width(work), max(work.itemsize, 4)
    queries = work.batch * work.heads * work.queries * width * work.itemsize
    keys = 2 * work.batch * work.kv_heads * work.keys * width
    ledger.hold(sums=queries + keys * wide)
    of_block, working = _block(work)
    found = of_block.batch * work.heads * (of_block.queries + 2 * of_block.keys) * width * work.itemsize
    workspace = fused_backward_workspace(of_block)
    ledger.phase("backward of attention", tile=working, workspace=workspace, gradients=found)
    one = of_block.batch * work.kv_heads * of_block.keys * width
    summed = one * work.itemsize if work.heads != work.kv_heads else 0
    widened = one * wide if wide > work.itemsize else 0
    ledger.phase("backward of attention", tile=working, gradients=found + summed + widened)
    if widened:
        ledger.phase("backward of attention", gradients=keys * work.itemsize)


def in_layout(work: Workload) -> bool:
    """Whether the context lies in memory as the queries of a projection do, with the heads of a token side by side."""
    return not fused_factors(work) and Apart.of(work).q and work.value_dim == work.head_dim


def _sums(work: Workload) -> int:
    """A number for each query."""
    return work.batch * work.heads * work.queries * max(work.itemsize, 4)


def _block(work: Workload) -> tuple[Workload, int]:
    """The block that holds most, as an attention of its own, and the bytes of what is put together for it."""
    tile = Tile.of(work)
    joined = min(_joined(work), tile.keys)
    whole = _working(work, tile, tile.keys, 0)
    if not joined or (found := _working(work, tile, joined, joined)) < whole:
        return replace(work, batch=tile.sequences, queries=tile.queries, keys=tile.keys), whole
    return replace(work, batch=tile.sequences, queries=tile.queries, keys=joined), found


def _working(work: Workload, tile: Tile, keys: int, joined: int) -> int:
    """The mask of a block, its keys put together where they lie apart, and repeated for the heads of queries."""
    each = 2 * tile.sequences * fused_width(work) * work.itemsize
    copied = each * work.kv_heads * joined
    repeated = each * work.heads * keys if work.heads != work.kv_heads else 0
    mask = tile.queries * keys * score_itemsize(work) if work.spec.masks else 0
    # Keys that were put together go once they are repeated.
    return mask + _remembered(work, tile) + (repeated + copied // 2 if repeated else copied)


def _joined(work: Workload) -> int:
    return widest_joined(_layout(work), tiling_of(work))


def _remembered(work: Workload, tile: Tile) -> int:
    """What positions hide, of pieces that others look like."""
    fitted, layout = tiling_of(work), _layout(work)
    if not few_cells(layout, fitted):
        return limits_of(work, tile)
    alike = sum(kind.rows * kind.remembered_width for kind in strips_of(layout, fitted, rows_whole=True))
    each = work.batch if work.batched_offsets else 1
    return int(min(KEPT * fitted.largest, each * alike)) * score_itemsize(work)


def _layout(work: Workload) -> Layout:
    pattern = pattern_of(work.spec.masks, work.queries, work.told_keys, work.past)
    return Layout(pattern, work.past, work.queries, work.told_keys, work.extra)

"""Memory of the blocked kernel where PyTorch's fused one computes its blocks: results, and one block at a time."""

from collections.abc import Callable
from dataclasses import replace

from attention_service.core.masks import pattern_of
from attention_service.core.patterns import making
from attention_service.cost.blocked_tiles import Tile, largest_tiles
from attention_service.cost.fused_memory import (
    fused_backward_workspace,
    fused_context,
    fused_width,
    fused_workspace,
)
from attention_service.cost.pairs import score_itemsize
from attention_service.cost.workload import Workload


def block_bytes(work: Workload) -> int:
    """The most that is worked in while a block is computed."""
    most = 0
    for of_block, made, working in _blocks(work):
        attended = of_block.batch * of_block.heads * of_block.queries * fused_width(work) * work.itemsize
        most = max(most, made, working + fused_workspace(of_block) + attended)
    return most


def block_backward_bytes(work: Workload, laid_out: Callable[[int, int], bool]) -> int:
    """The most that is worked in while the gradients of a block are found.

    ``laid_out``: whether the gradient of the context of so many sequences and queries lies token by token.
    """
    width, wide, most = fused_width(work), max(work.itemsize, 4), 0
    for of_block, made, working in _blocks(work):
        found = of_block.batch * work.heads * (of_block.queries + 2 * of_block.keys) * width * work.itemsize
        copied = 0 if laid_out(of_block.batch, of_block.queries) else fused_context(of_block)
        workspace = fused_backward_workspace(of_block) + copied
        one = of_block.batch * work.kv_heads * of_block.keys * width
        summed = one * work.itemsize if work.heads != work.kv_heads else 0
        widened = one * wide if wide > work.itemsize else 0
        most = max(most, made, working + found + max(workspace, summed + widened))
    return most


def _blocks(work: Workload) -> list[tuple[Workload, int, int]]:
    """Each block that may hold most, as an attention of its own.

    And the bytes while its mask is made, and of what is put together for it.
    """
    together, found = largest_tiles(work)
    tiles = [each.tile for each in found]
    one = replace(work, batch=together, kv_heads=work.heads)  # each head of queries has keys of its own
    return [(replace(one, queries=tile.queries, keys=tile.keys), *_working(work, together, tile)) for tile in tiles]


def _working(work: Workload, together: int, tile: Tile) -> tuple[int, int]:
    """The mask of a block as it is made; and made, beside keys put together or repeated for the heads of queries."""
    each = 2 * together * fused_width(work) * work.itemsize
    copied = each * work.kv_heads * tile.keys if tile.spans > 1 else 0
    repeated = each * work.heads * tile.keys if work.heads != work.kv_heads else 0
    pattern, c = pattern_of(work.spec.masks, work.queries, work.told_keys, work.past), score_itemsize(work)
    mask = tile.queries * tile.keys * tile.masked + (tile.limits if pattern.laid_out else 0)
    # What is not remembered is gone once the mask is made, after the keys; keys and then values that were put together,
    # once they are repeated.
    laid_out = (tile.passing * c if pattern.laid_out else 0) + making(pattern, tile.fresh, tile.queries)
    part = repeated or copied
    return part + max(mask * c + laid_out, copied // 2 if repeated else 0), mask * c + part

"""Blocks of queries: parts of a computation that need not be in memory at once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from attention_service.core.cancellation import checkpoint
from attention_service.core.problem import Problem, Selection
from attention_service.core.slices import on_gpu

PartT = TypeVar("PartT")
SCORES_AT_ONCE = 2**20
"""Scores of a block, about, on a CPU, whose caches hold a part of them."""
_ON_GPU = 8
"""The same on a GPU, as a multiple: there each operation on a block is a launch."""
MAX_PARTS_APART = 3
"""Parts of meta tensors that are each run; of more, one stands for those between the first and the last."""
_LEAST_ROWS = 16
"""Queries of a block below which reading the keys of all heads takes longer than the products."""
_MANY = 64
"""Number of blocks of meta tensors beyond which one represents the rest."""

REPEATED: ContextVar[Callable[[int | Fraction], AbstractContextManager[None]]] = ContextVar(
    "REPEATED", default=lambda times: nullcontext()
)
"""Context of one block of meta tensors that represents several equal ones."""


def some_of(x: Tensor, parts: Sequence[PartT]) -> Iterator[PartT]:
    """Yield each part of long work, with a checkpoint before it.

    Of many parts of meta tensors, the one before the last stands for all between the first and the last.
    """
    few = x.is_meta and len(parts) > MAX_PARTS_APART
    for at, times in ((0, 1), (-2, len(parts) - 2), (-1, 1)) if few else ((at, 1) for at in range(len(parts))):
        checkpoint()
        with REPEATED.get()(times):
            yield parts[at]


def scores_at_once(*, gpu: bool) -> int:
    """Return the scores of a block, about."""
    return SCORES_AT_ONCE * (_ON_GPU if gpu else 1)


def rows_at_once(batch: int, heads: int, keys: int, *, gpu: bool = False) -> int:
    """Return the queries of a block: about a million scores ``[batch, heads, rows, keys]``, at least one row."""
    return max(1, scores_at_once(gpu=gpu) // max(1, batch * heads * keys))


def blocks(problem: Problem, selection: Selection) -> list[Selection]:
    """Divide the selection along its queries into blocks of that size, at least one."""
    batch, heads, queries, _ = problem.q.shape
    rows = rows_at_once(batch, len(selection.heads or range(heads)), problem.k.shape[2], gpu=on_gpu(problem.q))
    wanted = range(queries) if selection.queries is None else selection.queries
    if len(wanted) <= rows:
        return [selection]
    return [replace(selection, queries=wanted[start : start + rows]) for start in range(0, len(wanted), rows)]


def tiles(problem: Problem, selection: Selection) -> list[Selection]:
    """Divide the selection into blocks of queries, of one head each if blocks of all heads would be few queries."""
    batch, heads, queries, _ = problem.q.shape
    chosen = tuple(range(heads)) if selection.heads is None else selection.heads
    least = min(_LEAST_ROWS, queries if selection.queries is None else len(selection.queries))
    rows = rows_at_once(batch, len(chosen), problem.k.shape[2], gpu=on_gpu(problem.q))
    if len(chosen) == 1 or rows >= least:
        return blocks(problem, selection)
    return [tile for head in chosen for tile in blocks(problem, replace(selection, heads=(head,)))]


class PlacedTile(NamedTuple):
    """A tile, and its place in a result that has the selected heads and queries alone."""

    tile: Selection
    heads: slice
    queries: slice


def placed_tiles(problem: Problem, selection: Selection, *, all_heads: bool = False) -> list[PlacedTile]:
    """Divide the selection as ``tiles`` does; ``all_heads``: as ``blocks`` does."""
    _, heads, queries, _ = problem.q.shape
    heads = heads if selection.heads is None else len(selection.heads)
    queries = queries if selection.queries is None else len(selection.queries)
    placed, head, start = [], 0, 0
    for tile in blocks(problem, selection) if all_heads else tiles(problem, selection):
        rows = queries if tile.queries is None else len(tile.queries)
        across = 1 if tile.heads is not None and len(tile.heads) < heads else heads
        placed.append(PlacedTile(tile, slice(head, head + across), slice(start, start + rows)))
        start += rows
        if start == queries:
            head, start = head + across, 0
    return placed


def put_together(parts: Iterator[Tensor], queries: int) -> Tensor:
    """Yield parts along the queries ``[.., .., queries, ...]``, without a graph.

    Of very many parts of meta tensors, the second represents the rest.
    """
    checkpoint()
    blocks_read = [next(parts)]
    rows = blocks_read[0].shape[2]
    missing = queries - rows
    if blocks_read[0].is_meta and missing > _MANY * rows:
        blocks_read.append(blocks_read[0].new_empty(*blocks_read[0].shape[:2], missing, *blocks_read[0].shape[3:]))
        with REPEATED.get()(-(-missing // rows)):
            next(parts)
    else:
        blocks_read += parts
    return torch.cat(blocks_read, 2)

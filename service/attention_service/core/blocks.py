"""Blocks of queries: parts of a computation that need not be in memory at once."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attention_service.core.types import Problem, Selection

_ELEMENTS = 2**20


def rows_at_once(batch: int, heads: int, keys: int) -> int:
    """Return the queries of a block: about a million scores ``[batch, heads, rows, keys]``, at least one row."""
    return max(1, _ELEMENTS // max(1, batch * heads * keys))


def blocks(problem: Problem, selection: Selection) -> list[Selection]:
    """Divide the selection along its queries into blocks of that size, at least one."""
    batch, heads, queries, _ = problem.q.shape
    rows = rows_at_once(batch, len(selection.heads or range(heads)), problem.k.shape[2])
    wanted = tuple(range(queries)) if selection.queries is None else selection.queries
    if len(wanted) <= rows:
        return [selection]
    return [replace(selection, queries=wanted[start : start + rows]) for start in range(0, len(wanted), rows)]


def put_together(parts: Iterator[Tensor], queries: int) -> Tensor:
    """Parts along the queries ``[.., .., queries, ...]``, which no graph leads to, as they are made.

    Of tensors without numbers, which have sizes alone, two are made, beside one as large as all of them.
    """
    found = [next(parts)]
    missing = queries - found[0].shape[2]
    if found[0].is_meta and missing > 0:
        found.append(found[0].new_empty(*found[0].shape[:2], missing, *found[0].shape[3:]))
        next(parts)
    else:
        found += parts
    return torch.cat(found, 2)

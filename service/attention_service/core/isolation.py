"""Keys that hold a NaN or an infinity: only the queries that may look at them come to harm."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from attention_service.core.blocks import blocks
from attention_service.core.groups import one_for_each_query_head
from attention_service.core.types import Problem, Selection
from attention_service.core.visibility import real_keys, visibility


def unfit_keys(problem: Problem) -> Tensor | None:
    """Bool ``[B, Hkv, K]``: keys, no padding, that hold or whose values hold what is not finite; None for none.

    One look at the numbers: on a GPU it waits for them.
    """
    if problem.finite or problem.k.is_meta:
        return None
    k, v = problem.k.detach(), problem.v.detach()
    if math.isfinite(told_by(k, v)):
        return None
    unfit = ~(k.isfinite().all(-1) & v.isfinite().all(-1))
    real = real_keys(problem)
    unfit = unfit if real is None else unfit & real[:, None]
    return unfit if bool(unfit.any()) else None


def told_by(k: Tensor, v: Tensor) -> Tensor:
    """A number that is finite only where all of these are; it takes next to no memory.

    Where a sum of large numbers overflows, it is not, though all of them are: then a closer look is due.
    """
    return _total(k) + _total(v)


def _total(x: Tensor) -> Tensor:
    if x.dtype != torch.float16:
        return x.sum()
    rows = x if x.is_cuda else x.sum(-1)  # a CPU makes a copy of what it adds up in another dtype
    return rows.sum(dtype=torch.float32)


def without(unfit: Tensor, problem: Problem) -> Problem:
    """The problem with zeros for these keys and their values: 0 · NaN would be NaN for every query."""
    where = unfit[..., None]
    return replace(problem, k=problem.k.masked_fill(where, 0), v=problem.v.masked_fill(where, 0))


def poisoned(unfit: Tensor, scores: Tensor) -> Tensor:
    """Scores ``[B, H', Q, K]`` with NaN at these keys, of the key/value heads that these heads read."""
    return scores.masked_fill(_by_query_head(unfit, scores.shape[1]), torch.nan)


def poisoned_rows(context: Tensor, where: Tensor) -> Tensor:
    """The context with NaN in the harmed rows ``[B, H, Q, 1]``, for which the gradient is NaN too."""
    return context * torch.ones_like(where, dtype=context.dtype).masked_fill(where, torch.nan)


def harmed(unfit: Tensor, problem: Problem) -> Tensor:
    """Bool ``[B, H, Q, 1]``: queries that may look at one of these keys."""
    heads = problem.q.shape[1]
    each = _by_query_head(unfit, heads)
    rows = []
    for block in blocks(problem, Selection()):
        seen = visibility(problem, block)
        may = each if seen.allowed is None else each & seen.allowed
        may = may if seen.bias is None else may & (seen.bias != -torch.inf)
        count = problem.q.shape[2] if block.queries is None else len(block.queries)
        rows.append(may.any(-1, keepdim=True).expand(problem.q.shape[0], heads, count, 1))
    return torch.cat(rows, 2)


def _by_query_head(unfit: Tensor, heads: int) -> Tensor:
    """``[B, Hkv, K]`` to ``[B, H, 1, K]``."""
    return one_for_each_query_head(unfit[..., None], heads).mT

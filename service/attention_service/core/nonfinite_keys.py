"""Keys with a NaN or an infinity: only queries that may look at them get NaN."""

from dataclasses import replace

import torch
from torch import Tensor

from attention_service.core.blocks import blocks
from attention_service.core.cancellation import checkpoint
from attention_service.core.masks.visibility import real_at, real_keys, visibility, without_padding
from attention_service.core.problem import Problem, Selection
from attention_service.core.scores import SCORES, Product
from attention_service.core.tensors import are_finite, one_for_each_query_head


def find_nonfinite_keys(problem: Problem) -> Tensor | None:
    """Find keys with a nonfinite number in the key or in its value: bool ``[B, Hkv, K]``; None if there are none.

    Padding does not count. On a GPU this waits for the numbers, unless they are ``assumed_finite``.
    """
    if problem.finite:
        return None
    k, v = problem.k.detach(), problem.v.detach()
    if are_finite(_total(k), _total(v)):
        return None
    nonfinite = ~(k.isfinite().all(-1) & v.isfinite().all(-1))
    real = real_keys(problem)
    nonfinite = nonfinite if real is None else nonfinite & real[:, None]
    return nonfinite if bool(nonfinite.any()) else None


def finite_part(problem: Problem) -> tuple[Problem, Tensor | None]:
    """Return the problem with zeros for its nonfinite keys, and these keys, bool ``[B, Hkv, K]``; None without any.

    Padding of finite numbers, whose weights are 0, stays if the score is one of a query and a key alone: it takes
    longer to fill than to read. Not for a problem that is ``finite`` already.
    """
    score = SCORES.of(problem.spec.score)
    plain = isinstance(score, Product) and score.plain
    if plain and are_finite(_total(problem.k.detach()), _total(problem.v.detach())):
        return replace(problem, finite=True), None
    nonfinite = find_nonfinite_keys(problem)
    if nonfinite is None:
        return replace(without_padding(problem), finite=True), None
    return without(nonfinite, problem), nonfinite


def sum_of(k: Tensor, v: Tensor) -> Tensor:
    """Sum both tensors: the sum is finite only if all numbers are. It takes next to no memory.

    A sum of large finite numbers may overflow; then the tensors must be examined one by one.
    """
    return _total(k) + _total(v)


def _total(x: Tensor) -> Tensor:
    if x.dtype != torch.float16:
        return x.sum()
    rows = x if x.is_cuda else x.sum(-1)  # a CPU makes a copy of what it adds up in another dtype
    return rows.sum(dtype=torch.float32)


def without(nonfinite: Tensor, problem: Problem) -> Problem:
    """Put zeros in place of these keys and their values: 0 · NaN would be NaN for every query."""
    where = nonfinite[..., None]
    return replace(problem, k=problem.k.masked_fill(where, 0), v=problem.v.masked_fill(where, 0))


def without_nonfinite_padding(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put zeros in place of padded tokens of key and value if any number of them is nonfinite.

    A forward pass does not read what padded tokens become. The backward pass of a projection or a norm multiplies their
    numbers by a gradient of 0, and 0 · NaN would be NaN. ``tensors`` are those of a request by the names of its
    fields.
    """
    tokens = [name for name in ("key", "value") if name in tensors]
    mask, lengths = tensors.get("key_mask"), tensors.get("key_lengths")
    if not tokens or (mask is None and lengths is None):
        return tensors
    if are_finite(*(_total(tensors[name].detach()) for name in tokens)):
        return tensors
    past, first = tensors["past_key"].shape[2] if "past_key" in tensors else 0, tensors[tokens[0]]
    index = torch.arange(past + first.shape[-2], device=first.device)
    real = real_at(index, None if mask is None else mask.bool(), lengths)
    assert real is not None  # noqa: S101 - one of the two is given
    padded = ~real[:, past:, None]  # [B, new, 1]
    cleaned: dict[str, Tensor] = {}
    for name in tokens:
        x = tensors[name]  # [B, new, width] or [B, Hkv, new, width]
        cleaned[name] = x.masked_fill(padded if x.ndim == 3 else padded[:, None], 0)
    return {**tensors, **cleaned}


def with_nan_scores(nonfinite: Tensor, scores: Tensor) -> Tensor:
    """Put NaN into scores ``[B, H', Q, K]`` at these keys of the key/value heads that the heads read."""
    return scores.masked_fill(_by_query_head(nonfinite, scores.shape[1]), torch.nan)


def with_nan_rows(context: Tensor, where: Tensor) -> Tensor:
    """Put NaN into these rows ``[B, H, Q, 1]`` of the context. Their gradient is NaN too."""
    return context * torch.ones_like(where, dtype=context.dtype).masked_fill(where, torch.nan)


def affected_queries(nonfinite: Tensor, problem: Problem) -> Tensor:
    """Find the queries that may look at one of these keys: bool ``[B, H, Q, 1]``."""
    heads = problem.q.shape[1]
    touched = _by_query_head(nonfinite, heads)
    rows = []
    for block in blocks(problem, Selection()):
        checkpoint()
        seen = visibility(problem, block)
        may = touched if seen.allowed is None else touched & seen.allowed
        may = may if seen.bias is None else may & (seen.bias != -torch.inf)
        count = problem.q.shape[2] if block.queries is None else len(block.queries)
        rows.append(may.any(-1, keepdim=True).expand(problem.q.shape[0], heads, count, 1))
    return torch.cat(rows, 2)


def _by_query_head(nonfinite: Tensor, heads: int) -> Tensor:
    """``[B, Hkv, K]`` to ``[B, H, 1, K]``."""
    return one_for_each_query_head(nonfinite[..., None], heads).mT

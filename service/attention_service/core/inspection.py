"""Inspection of weights: statistics over the real queries, and the most attended keys of each query.

The computation is blockwise, so that only the weights of one block are in memory.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from attention_service.core.blocks import blocks
from attention_service.core.edits import BoundEdit
from attention_service.core.stages import narrow, stages
from attention_service.core.types import Problem, Selection
from attention_service.core.visibility import real_keys

Top = tuple[Tensor, Tensor]
"""Weights and indices of keys, ``[B, H, Q, count]``."""


Weights = Callable[[Selection], Tensor]
"""The weights ``[B, H, Q, K]`` of the selected heads and queries."""


def weights_after(problem: Problem, edits: Sequence[BoundEdit]) -> Weights:
    """Make the function that gives the weights after these edits.

    Edits need the whole of every tap, so all weights are computed once; without edits, each selection by itself.
    """
    if not edits:
        return partial(weights_of, problem)
    whole = dict(stages(problem, ("weights",), edits))["weights"]
    return lambda selection: narrow(whole, "weights", problem, selection)


def weights_of(problem: Problem, selection: Selection) -> Tensor:
    """Compute the weights of the selected heads and queries."""
    return dict(stages(problem, ("weights",), selection=selection))["weights"]


def top(problem: Problem, selection: Selection, count: int, weights: Weights | None = None) -> Top:
    """Find the most attended keys of each selected query: weights and indices, −1 for no key."""
    return together([top_of(problem, block, count, weights) for block in blocks(problem, selection)])


def top_of(problem: Problem, block: Selection, count: int, weights: Weights | None = None) -> Top:
    """Find the most attended keys of one block. Keys without weight keep their indices."""
    found = (weights or partial(weights_of, problem))(block).topk(count, dim=-1)
    return found.values, found.indices


def together(tops: Iterable[Top]) -> Top:
    """Concatenate the results of several blocks."""
    parts = [*tops]
    weights, keys = (torch.cat(each, dim=2) for each in zip(*parts, strict=True))
    return weights, keys.masked_fill(weights == 0, -1)


def positions_of(problem: Problem) -> Tensor:
    """Return the position of each query among the keys, ``[B, Q]``."""
    batch, _, queries, _ = problem.q.shape
    device = problem.q.device
    offset = torch.full((batch,), problem.past, device=device)
    if problem.offsets is not None:
        offset = problem.offsets.to(device).expand(batch)
    return torch.arange(queries, device=device) + offset[:, None]


def real_queries(problem: Problem) -> Tensor:
    """Mark the real queries, bool ``[B, Q]``: in self-attention those whose own key is real, otherwise all."""
    batch, _, queries, _ = problem.q.shape
    real = real_keys(problem)
    if real is None or queries != problem.keys - problem.past:
        return torch.ones(batch, queries, dtype=torch.bool, device=problem.q.device)
    return real[:, problem.past : problem.keys]


class Totals:
    """Sums over the real queries seen so far, ``[B, H]`` in float64."""

    def __init__(self, batch: int, heads: int, device: torch.device) -> None:
        self.queries = torch.zeros(batch, dtype=torch.int64, device=device)
        self._looking = torch.zeros(batch, heads, dtype=torch.float64, device=device)
        self._sums: dict[str, Tensor] = {}

    def add(self, weights: Tensor, real: Tensor, positions: Tensor) -> None:
        """Add weights ``[B, H, R, K]`` of queries at positions ``[B, R]`` where ``real`` ``[B, R]`` is true."""
        keys = torch.arange(weights.shape[-1], device=weights.device)
        shares = weights / weights.sum(-1, keepdim=True)  # NaN for a query without weights, which is not counted
        distance = (positions[:, None, :, None] - keys).abs()  # [B, 1, R, K]
        own = distance == 0
        looking = real[:, None] & (weights > 0).any(-1)  # [B, H, R]: a query that may look nowhere has no weights
        rows = {
            "entropy": torch.special.entr(shares).sum(-1),
            "max_weight": weights.amax(-1) if keys.numel() else weights.sum(-1),
            "mean_distance": (shares * distance).sum(-1),
            "first_key": shares[..., :1].sum(-1),
            "own_position": (shares * own).sum(-1),
        }
        for name, row in rows.items():
            self._sums[name] = self._sums.get(name, 0) + torch.where(looking, row, 0).sum(-1)
        self._looking += looking.sum(-1)
        self.queries += looking.any(1).sum(-1)

    def means(self) -> dict[str, Tensor]:
        """Return the mean of each statistic over the real queries; NaN if there are none."""
        names = ("entropy", "max_weight", "mean_distance", "first_key", "own_position")
        none = torch.zeros_like(self._looking)
        return {name: self._sums.get(name, none) / self._looking for name in names}


def totals(problem: Problem, real: Tensor, looked_at: Iterable[Selection], weights: Weights | None = None) -> Totals:
    """Sum over all heads and those queries of these blocks that are ``real`` ``[B, Q]``."""
    weights = weights or partial(weights_of, problem)
    batch, heads, _, _ = problem.q.shape
    found, positions = Totals(batch, heads, problem.q.device), positions_of(problem)
    for block in looked_at:
        rows = slice(None) if block.queries is None else list(block.queries)
        found.add(weights(block).double(), real[:, rows], positions[:, rows])
    return found

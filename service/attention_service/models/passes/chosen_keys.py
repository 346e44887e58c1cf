"""The keys that a choice keeps for each query, and their share of the weights that there would be without it.

Notation as in ``core.problem``.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_service.core.blocks import tiles
from attention_service.core.edits import BoundEdit
from attention_service.core.inspection.statistics import StatisticInputs
from attention_service.core.inspection.weights import TiledWeights, real_queries, totals
from attention_service.core.masks.visibility import visibility
from attention_service.core.problem import Problem, Selection

CHOSEN_SHARE: Final = "chosen_share"
"""The statistic of weights without the choice."""
_BEFORE_MASKS: Final = frozenset({"q", "k", "v", "scores", "capped_scores"})


def seen_keys(problem: Problem) -> Tensor:
    """Return the keys that a query may look at, bool ``[B, Q, K]``: the masks allow them, and a choice kept them.

    All heads see the same.
    """
    batch, _, queries, _ = problem.q.shape
    zeros = problem.q.new_zeros(batch, 1, queries, problem.k.shape[2])
    return visibility(problem).forbid(zeros, own=True)[:, 0] > -torch.inf


def dense_keys(problem: Problem, real: Tensor | None, scores: Tensor | None) -> Tensor:
    """Return the keys that a query could look at without the choice, bool ``[B, 1, Q, K]``.

    real: bool ``[B, Q]``, the tokens that are no padding; None if all are. scores: the indexer's, ``[B, Q, T]``, −∞ for
    candidates that cannot be chosen. If there are more keys than queries, the candidates are the last T of them; else
    they are the tokens up to the query's own.
    """
    queries, keys = problem.q.shape[2], problem.k.shape[2]
    if keys > queries and scores is not None:
        candidates = pad(scores > -torch.inf, (keys - scores.shape[-1], 0), value=False)
        return (seen_keys(problem) | candidates)[:, None]
    earlier = torch.ones(queries, keys, dtype=torch.bool, device=problem.q.device).tril(keys - queries)
    dense = earlier.expand(problem.q.shape[0], 1, -1, -1)
    return dense if real is None else dense & real.bool()[:, None, None]


def chosen_share(
    problem: Problem, dense: Tensor, real: Tensor | None = None, edits: Sequence[BoundEdit] = ()
) -> Tensor:
    """Return Σ p over the chosen keys ``[B, H]``, the mean over the real queries; p are the weights of dense attention.

    Edits act as they do on the attention itself, up to its masks.
    """
    spec = problem.spec.model_copy(update={"masks": []})
    whole = replace(problem, spec=spec, mask=dense, key_mask=None)
    edits = [edit for edit in edits if edit.tap in _BEFORE_MASKS]
    inputs = StatisticInputs(chosen=seen_keys(problem))
    every = tiles(whole, Selection())
    rows = real_queries(whole) if real is None else real.bool()
    found = totals(whole, rows, every, TiledWeights(whole, edits).compute, (CHOSEN_SHARE,), inputs)
    share: Tensor = found.means()[CHOSEN_SHARE]
    return share

"""The bias of a position encoding, computed for the requested heads, queries and keys."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_service.core.masks.key_spans import pick_spans
from attention_service.core.positions import POSITIONS, HeadSubset, Position
from attention_service.core.positions.token_positions import places_in
from attention_service.core.problem import Problem, Span
from attention_service.core.tensors import pick


@dataclass(frozen=True)
class PairBias:
    """Bias of a position encoding, added to the scores with the request's float mask before masking."""

    problem: Problem
    position: Position
    queries: Tensor
    """``[1 or B, Q]``: places."""
    keys: Tensor
    """``[1 or B, K]``: places; arbitrary for keys that the spec adds, which have no bias."""
    dtype: torch.dtype

    def tile(
        self,
        queries: Sequence[int] | None = None,
        keys: Sequence[Span] | None = None,
        heads: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the bias of these queries, keys and heads: ``[1 or B, H, Q, K]``."""
        rows, columns = _queries(self.queries, queries), _keys(self.keys, keys)
        of = HeadSubset(self.problem.q.shape[1], heads)
        bias = self.position.bias(rows, columns, of, self.problem.learned, self.dtype)
        if bias is None:
            raise ValueError(f"the position encoding {self.problem.spec.position.name} has no bias")
        if not self.problem.added_keys:
            return bias
        added = torch.arange(self.keys.shape[1], device=self.keys.device) >= self.problem.keys
        return bias.masked_fill(_keys(added[None], keys), 0)


def pair_bias(problem: Problem, dtype: torch.dtype) -> PairBias | None:
    """Return the bias of a problem, in the dtype of its scores; None if its position encoding has none."""
    position = POSITIONS.of(problem.spec.position)
    if not position.biased:
        return None
    places = places_in(problem)
    return PairBias(problem, position, places.queries, pad(places.keys, (0, problem.added_keys)), dtype)


def _queries(places: Tensor, index: Sequence[int] | None) -> Tensor:
    return places if index is None else pick(places, 1, index)


def _keys(places: Tensor, spans: Sequence[Span] | None) -> Tensor:
    return places if spans is None else pick_spans(places, 1, spans)

"""Positions of queries and keys.

The place of query i is i + offset, the offset being the length of the past unless the request says otherwise; that of
key j is its index among all keys. Given positions are the places of the new tokens: of the queries, and, being the same
tokens, of the new keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention_service.core.problem import Problem

MAX_POSITION = 2**61
"""Limit of places: beyond any sequence, and small enough that differences of places fit int64."""


@dataclass(frozen=True)
class TokenPositions:
    """Places of one attention, int64. The first dimension is B if the sequences have different places."""

    queries: Tensor
    """``[1 or B, Q]``"""
    new_keys: Tensor
    """``[1 or B, K − P]``; the same tensor as ``queries`` if the two are known to be equal."""
    past: int
    """P: the past keys have the places 0 to P − 1."""

    @property
    def keys(self) -> Tensor:
        """``[1 or B, K]``, the past included."""
        if not self.past:
            return self.new_keys
        before = torch.arange(self.past, device=self.new_keys.device)
        return torch.cat([before.expand(self.new_keys.shape[0], -1), self.new_keys], 1)

    @property
    def reach(self) -> Tensor:
        """``[1 or B, 1]``: number of places of a sequence, up to its last query or key."""
        ends = [x.amax(1, keepdim=True) for x in (self.queries, self.new_keys) if x.shape[1]]
        last = torch.full((1, 1), self.past - 1, device=self.queries.device)
        for end in ends:
            last = torch.maximum(last, end)
        return last + 1


def places_of(
    queries: int,
    new_keys: int,
    past: int = 0,
    offsets: Tensor | None = None,
    positions: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> TokenPositions:
    """Return the places of this many queries and new keys after this many past keys.

    offsets ``[B]`` or ``[]``; positions ``[B, Q]``, which go before offsets, and need as many new keys as queries.
    """
    if positions is not None:
        given = positions.to(device).long().clamp(-MAX_POSITION, MAX_POSITION)
        return TokenPositions(given, given, past)
    of_keys = torch.arange(past, past + new_keys, device=device)[None]
    if offsets is None and queries == new_keys:
        return TokenPositions(of_keys, of_keys, past)
    shift = (
        torch.full((), past, device=device)
        if offsets is None
        else offsets.to(device).long().clamp(-MAX_POSITION, MAX_POSITION)
    )
    return TokenPositions(torch.arange(queries, device=device) + shift.view(-1, 1), of_keys, past)


def places_in(problem: Problem) -> TokenPositions:
    """Return the places of a problem's queries and keys, without the keys that the spec adds."""
    queries, new_keys = problem.q.shape[2], problem.keys - problem.past
    return places_of(queries, new_keys, problem.past, problem.offsets, problem.positions, problem.q.device)

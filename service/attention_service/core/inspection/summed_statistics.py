"""Statistics that are no mean over queries: each adds up what it needs of tiles of weights, in one class.

Notation as in ``statistics``. A new one is one class in ``SUMMED_STATISTICS``.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_service.core.inspection.statistics import (
    PAIRS,
    RECEIVED,
    RETRIEVAL,
    GivenPairs,
    StatisticInputs,
    WeightTile,
)


class WeightSizes(NamedTuple):
    """The sizes of all weights, of which tiles have some heads and queries, and some of the first keys."""

    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device


class SummedStatistic(ABC):
    """One statistic of all weights, from tiles that are added one by one."""

    def __init__(self, sizes: WeightSizes, inputs: StatisticInputs) -> None:
        """Begin with no tile."""
        self._sizes, self._inputs = sizes, inputs

    @abstractmethod
    def add(self, tile: WeightTile, heads: slice, counted: Tensor) -> None:
        """Add the tile of these heads. ``counted``, bool ``[B, h, R]``: the queries to count."""

    @abstractmethod
    def value(self, counts: Tensor) -> Tensor | dict[str, Tensor]:
        """Return it for each head. ``counts [B, H]``: the number of queries that were counted."""

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros(self._sizes.batch, self._sizes.heads, *shape, dtype=dtype, device=self._sizes.device)


class Retrieval(SummedStatistic):
    """The share of the needle's keys that are copied, each counted once ``[B, H]``. Source: Wu et al. 2024."""

    def __init__(self, sizes: WeightSizes, inputs: StatisticInputs) -> None:
        """Keep a count for each key of a head. Raises TypeError without a needle and tokens."""
        super().__init__(sizes, inputs)
        if inputs.needle is None or inputs.tokens is None:
            raise TypeError("the statistic needs a needle and tokens; binding refuses the request")
        self._needle, self._tokens = inputs.needle, inputs.tokens
        self._copies = self._zeros(sizes.keys, dtype=torch.int32)

    def add(self, tile: WeightTile, heads: slice, counted: Tensor) -> None:
        """Count the queries that copy each key.

        A query copies its most attended key if that is one of the needle and has the token that comes after the query.
        """
        keys, following = tile.weights.shape[-1], tile.inputs.next_tokens
        if following is None:
            raise TypeError("the statistic needs the tokens after the queries; binding refuses the request")
        if not keys:
            return
        most = tile.weights.max(-1).indices  # [B, h, R]; argmax on meta tensors imports sympy
        behind = (0, keys - self._needle.shape[1])
        needle, tokens = (pad(x, behind)[:, None].expand(-1, most.shape[1], -1) for x in (self._needle, self._tokens))
        copied = needle.gather(-1, most) & counted & (tokens.gather(-1, most) == following[:, None])
        self._copies[:, heads, :keys].scatter_add_(-1, most, copied.int())

    def value(self, counts: Tensor) -> Tensor:
        """Return the shares; NaN without a key of the needle."""
        share = (self._copies > 0).sum(-1).double() / self._needle.sum(-1)[:, None]
        return torch.where(counts > 0, share, torch.nan)


class Received(SummedStatistic):
    """Σ w / the number of queries that may see the key ``[B, H, K]``. Source: Gu et al. 2025, α of a key."""

    def __init__(self, sizes: WeightSizes, inputs: StatisticInputs) -> None:
        """Keep two numbers for each key of a head."""
        super().__init__(sizes, inputs)
        self._sums, self._seeing = self._zeros(sizes.keys), self._zeros(sizes.keys)

    def add(self, tile: WeightTile, heads: slice, counted: Tensor) -> None:
        """Add the weights of the queries, and the queries that may see each key."""
        keys, real = tile.weights.shape[-1], counted[..., None]
        self._sums[:, heads, :keys] += torch.where(real, tile.weights, 0).sum(2, dtype=torch.float64)
        if tile.visible is None:
            self._seeing[:, heads] += counted.sum(-1, keepdim=True)
        else:  # an edit may give weight to a key that no query may see
            self._seeing[:, heads, :keys] += (real & (tile.visible[..., :keys] | (tile.weights != 0))).sum(2)

    def value(self, counts: Tensor) -> Tensor:
        """Return the means; NaN for a key that no query may see."""
        return self._sums / self._seeing


class PairShares(SummedStatistic):
    """Mean weights of pairs (q, k) and how often k is q's first: as given, swapped, and with w + wᵀ in place of w.

    w + wᵀ is kept for the different queries of the pairs alone.
    """

    def __init__(self, sizes: WeightSizes, inputs: StatisticInputs) -> None:
        """Keep four numbers for each head. Raises TypeError without pairs."""
        super().__init__(sizes, inputs)
        if inputs.pairs is None:
            raise TypeError("the statistic needs pairs; binding refuses the request")
        self._pairs: GivenPairs = inputs.pairs
        self._sums = {name: self._zeros() for name in ("share", "first", "swapped_share", "swapped_first")}
        self._both: Tensor | None = None
        """``[B, H, D + 1, K]``: w + wᵀ of the different queries; the last is a place for all others."""

    def add(self, tile: WeightTile, heads: slice, counted: Tensor) -> None:
        """Add the pairs of which the tile has the weights."""
        pairs, weights = self._pairs, torch.where(counted[..., None], tile.weights, 0)
        if not weights.numel():
            return
        self._add_pairs(weights, tile.first, heads, (pairs.queries, pairs.keys), pairs.candidates, "")
        if pairs.same_tokens:
            swapped = pairs.keys, pairs.queries
            self._add_pairs(weights, tile.first, heads, swapped, pairs.swapped_candidates, "swapped_")
            self._add_both(weights, tile.first, heads)

    def _add_pairs(
        self, weights: Tensor, first: int, heads: slice, pairs: tuple[Tensor, Tensor], candidates: Tensor | None,
        prefix: str,
    ) -> None:  # fmt: skip
        """Add weights ``[B, h, R, K]`` of queries from ``first`` on, at pairs of queries and keys ``[B, P]``."""
        rows, keys = weights.shape[2:]
        row, key = pairs[0] - first, pairs[1]
        inside = ((pairs[0] >= 0) & (row >= 0) & (row < rows) & (key < keys))[:, None]  # [B, 1, P]
        row, place = (x[:, None].expand(-1, weights.shape[1], -1) for x in (row.clamp(0, rows - 1), key))
        at = weights.flatten(2).gather(-1, row * keys + place.clamp(0, keys - 1))  # [B, h, P]
        at = torch.where(inside, at, 0)
        firsts = (_most(weights, candidates).gather(-1, row) == place) & (at != 0)
        self._sums[f"{prefix}share"][:, heads] += at.sum(-1, dtype=torch.float64)
        self._sums[f"{prefix}first"][:, heads] += (firsts & inside).sum(-1)

    def _add_both(self, weights: Tensor, first: int, heads: slice) -> None:
        """Add rows and columns ``[B, h, R, K]`` of the different queries."""
        different = self._pairs.different  # [B, D]
        count, (batch, own, rows, keys) = different.shape[1], weights.shape
        if self._both is None:
            self._both = self._zeros(count + 1, self._sizes.keys, dtype=weights.dtype)
        is_row = torch.arange(first, first + rows, device=weights.device)[:, None] == different[:, None]  # [B, R, D]
        place = torch.where(is_row.any(-1), is_row.int().max(-1).indices, count)[:, None, :, None]
        self._both[:, heads, :, :keys].scatter_add_(2, place.expand(batch, own, rows, keys), weights)
        different = different[:, None, None]
        columns = different.clamp(0, keys - 1).expand(batch, own, rows, count)
        known = (different >= 0) & (different < keys)
        self._both[:, heads, :count, first : first + rows] += torch.where(known, weights.gather(-1, columns), 0).mT

    def value(self, counts: Tensor) -> dict[str, Tensor]:
        """Return each of the six means ``[B, H]``, or of the two of pairs as given; NaN without a counted query."""
        given = self._pairs.queries >= 0  # [B, P]
        sums = dict(self._sums)
        if self._pairs.as_given:
            sums = {name: sums[name] for name in ("share", "first")}
        else:
            if not self._pairs.same_tokens:  # w has no transpose
                sums |= {name: torch.full_like(counts, torch.nan) for name in ("swapped_share", "swapped_first")}
            sums["both_share"] = sums["share"] + sums["swapped_share"]
            sums["both_first"] = self._both_first(given)
        number = given.sum(-1)[:, None]
        return {name: torch.where(counts > 0, x / number, torch.nan) for name, x in sums.items()}

    def _both_first(self, given: Tensor) -> Tensor:
        """Count the pairs whose key has the largest w + wᵀ of its query ``[B, H]``."""
        if self._both is None:
            return self._zeros() if self._pairs.same_tokens else torch.full_like(self._zeros(), torch.nan)
        both, heads = self._both, self._sizes.heads
        place, key = (x[:, None].expand(-1, heads, -1) for x in (self._pairs.places, self._pairs.keys))
        at = both.flatten(2).gather(-1, place * both.shape[-1] + key.clamp(0))  # [B, H, P]
        firsts = (_most(both, self._pairs.candidates).gather(-1, place) == key) & (at != 0)
        return (firsts & given[:, None]).sum(-1).double()


def _most(weights: Tensor, candidates: Tensor | None) -> Tensor:
    """The key with the largest weight, the first of equal ones, among candidates ``[B, K]``: ``[B, H, R]``."""
    if candidates is not None:
        weights = weights.masked_fill(~candidates[:, None, None, : weights.shape[-1]], -torch.inf)
    return weights.max(-1).indices  # argmax on meta tensors imports sympy


SUMMED_STATISTICS: Final[Mapping[str, type[SummedStatistic]]] = {
    RETRIEVAL: Retrieval,
    RECEIVED: Received,
    PAIRS: PairShares,
}
"""The statistics that are no mean over queries, by name."""

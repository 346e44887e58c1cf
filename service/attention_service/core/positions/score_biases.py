"""Position encodings that add a bias to the scores, by head and distance."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from attention_contract import positions as options
from attention_service.core.positions.base import POSITIONS, HeadSubset, Inert, PositionCost, Tensors
from attention_service.core.problem import Learned, Widths
from attention_service.core.tensors import constant

TABLE = "relative_bias.weight"


@POSITIONS.register(
    options.Alibi,
    formula="s_ij − m_h·|p_i − p_j|, m_h = 2^(−8(h + 1)/H)",
    gradient="∂s unchanged",
    cost="O(n²·h)",
    source="Press et al. 2022, section 3",
)
@dataclass(frozen=True)
class Alibi(Inert):
    """Penalty proportional to the distance."""

    options: options.Alibi
    biased = True

    def bias(self, queries: Tensor, keys: Tensor, heads: HeadSubset, learned: Tensors, dtype: torch.dtype) -> Tensor:
        """Return −slope · distance."""
        ahead = keys[:, None, None] - queries[:, None, :, None]  # [1 or B, 1, Q, K]
        if self.options.symmetric:
            ahead = ahead.abs().neg()
        picked = slopes(heads.count) if heads.picked is None else [slopes(heads.count)[head] for head in heads.picked]
        return ahead.to(dtype) * constant(picked, keys.device, dtype).view(-1, 1, 1)

    def cost(self, head_dim: int, width: int) -> PositionCost:
        """The slope times the distance, and the sum."""
        return PositionCost(pair=2)


@lru_cache
def slopes(heads: int) -> tuple[float, ...]:
    """Return the slope of each head: for 2ᵐ heads a geometric series that ends at 2⁻⁸.

    Other numbers take the series of the largest 2ᵐ below, then every other slope of the series of twice as many.
    Source: Press et al. 2022, section 3, and the authors' code.
    """
    whole = 1 << (heads.bit_length() - 1)
    series = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
    between = [2 ** (-4 * (2 * head + 1) / whole) for head in range(heads - whole)]
    return (*series, *between)


@POSITIONS.register(
    options.RelativeBias,
    formula="s_ij + b_h[bucket(p_j − p_i)]",
    gradient="∂s unchanged, ∂b_h[c] = Σ ∂s_ij over the pairs of bucket c",
    cost="O(n²·h)",
    source="Raffel et al. 2020, section 2.1; buckets: the authors' code",
)
@dataclass(frozen=True)
class RelativeBias(Inert):
    """Learned number per bucket of distances."""

    options: options.RelativeBias
    biased = True

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Return the table: a number per bucket and head."""
        return {TABLE: Learned((self.options.num_buckets, widths.heads), heads=1)}

    def bias(self, queries: Tensor, keys: Tensor, heads: HeadSubset, learned: Tensors, dtype: torch.dtype) -> Tensor:
        """Return the number of each pair's bucket."""
        table = learned[TABLE].mT if heads.picked is None else learned[TABLE].mT[list(heads.picked)]  # [H, buckets]
        return table.to(dtype)[:, self.buckets(keys[:, None] - queries[..., None])].transpose(0, 1)

    def buckets(self, ahead: Tensor) -> Tensor:
        """Return the bucket of key place minus query place."""
        starts = constant(bucket_starts(self.options), ahead.device)
        if not self.options.bidirectional:
            return torch.bucketize(ahead.neg(), starts, right=True)
        buckets = torch.bucketize(ahead.abs(), starts, right=True)
        return buckets.add_((ahead > 0) * (self.options.num_buckets // 2))

    def cost(self, head_dim: int, width: int) -> PositionCost:
        """The sum; backward, the gradients of a bucket are summed."""
        return PositionCost(pair=1, pair_backward=1)


@lru_cache
def bucket_starts(rule: options.RelativeBias) -> tuple[int, ...]:
    """Return the distance at which each bucket begins, except the first of a direction.

    Of n buckets e = n/2 are for single distances; bucket e + c begins at the least d with
    d ≥ e·(max_distance/e)^(c/(n − e)), which is found in whole numbers, since many a bound is a whole number itself.
    """
    n = rule.num_buckets // 2 if rule.bidirectional else rule.num_buckets
    e = n // 2
    growing = n - e
    starts = list(range(1, e + 1))
    for c in range(1, growing):
        bound = e**growing * rule.max_distance**c
        d = max(starts[-1], int(e * (rule.max_distance / e) ** (c / growing)) - 2)
        while d**growing * e**c < bound:
            d += 1
        starts.append(d)
    return tuple(starts)

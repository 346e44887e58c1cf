"""Nyström attention: softmax attention through landmarks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_contract import spec
from attention_service.core.kernels.extent import Extent
from attention_service.core.masks.visibility import real_keys
from attention_service.core.methods.approximation import Approximation, no_masks, no_softmax, nothing_between, scored
from attention_service.core.methods.base import METHODS, MethodCost, MethodFlops, Refusal
from attention_service.core.problem import Problem
from attention_service.core.tensors import product


@METHODS.register(
    spec.Nystrom,
    formula="o = softmax(Q K̃ᵀ) · softmax(Q̃ K̃ᵀ)⁺ · softmax(Q̃ Kᵀ) · V, Q̃ and K̃ means of segments",
    gradient="through the means, the three softmaxes and each iteration of the pseudo-inverse",
    cost="O(n·m·d + n·m² + m³), m landmarks",
    source="Xiong et al. 2021, eqs. 13-14 and algorithm 1",
)
@dataclass(frozen=True)
class Nystrom(Approximation):
    """A few means of queries and keys stand between all queries and all keys."""

    options: spec.Nystrom

    def refuses(self, spec: spec.AttentionSpec) -> Iterator[Refusal]:
        """Yield masks, and every option that is not a softmax over dot products."""
        yield from no_softmax(spec)
        yield from no_masks(spec)
        yield from nothing_between(spec)

    def letters(self) -> Mapping[str, str]:
        """M landmarks."""
        return {"m": "landmarks"}

    def carried(self, *, module: bool) -> None:
        """Return None: landmarks are means over all queries, so a step of one query has others."""
        return

    def orders(self) -> tuple[str, str]:
        """With the keys, and of what stands between."""
        return "n·m·d + n·m²", "n·m"

    def _context(self, problem: Problem) -> dict[str, Tensor]:
        q, k, factor = scored(problem)
        dtype = torch.promote_types(q.dtype, torch.float32)
        q, k, v = q.to(dtype) * factor, k.to(dtype), problem.v.to(dtype)
        queries, keys = q.shape[2], k.shape[2]
        count = min(self.options.landmarks, queries, keys)
        real = real_keys(problem)
        if not count or (real is None and count == queries == keys):
            return {"context": product(product(q, k.mT).softmax(-1), v).to(problem.q.dtype)}
        means = _Means.of(real, count, queries, keys, problem.past, q)
        landmarks_q, landmarks_k = _mean(means.of_queries, q), _mean(means.of_keys, k)
        seen = means.seen  # [B or 1, 1, 1, m], None for all
        left = _softmax(product(q, landmarks_k.mT), seen)  # [B, H, Q, m]
        middle = _softmax(product(landmarks_q, landmarks_k.mT), seen)
        if means.used is not None:
            both = means.used[:, None, :, None] & means.used[:, None, None]
            middle = torch.where(both, middle, torch.eye(count, dtype=dtype, device=q.device))
        right = _softmax(product(landmarks_q, k.mT), means.real)  # [B, H, m, K]
        mixing = left @ _inverse(middle, self.options.iterations)  # [B, H, Q, m]
        if means.alone is not None:
            mixing = torch.where(means.alone, means.of_queries.mT[:, None], mixing)
        return {"context": (mixing @ product(right, v)).to(problem.q.dtype)}

    def cost(self, extent: Extent) -> MethodCost:
        """Return the cost by ``nystrom_cost``."""
        return nystrom_cost(extent, self.options)


@dataclass(frozen=True)
class _Means:
    """Averages of tokens into m landmarks, without padding; None stands for all tokens."""

    of_queries: Tensor
    """``[B or 1, m, Q]``"""
    of_keys: Tensor
    """``[B or 1, m, K]``"""
    used: Tensor | None = None
    """Bool ``[B, m]``: sequences with fewer real tokens have fewer landmarks."""
    seen: Tensor | None = None
    """Bool ``[B, 1, 1, m]``: the same, but all True if no landmark is used; their values are zeros."""
    real: Tensor | None = None
    """Bool ``[B, 1, 1, K]``: real keys; all True if no key is real."""
    alone: Tensor | None = None
    """Bool ``[B, 1, 1, 1]``: every real query and key is a landmark of its own."""

    @classmethod
    def of(cls, real: Tensor | None, count: int, queries: int, keys: int, past: int, like: Tensor) -> "_Means":
        """Build the averages. In self-attention (as many queries as new keys), a query is real if its own key is."""
        if real is None:
            one = torch.ones(1, 1, dtype=torch.bool, device=like.device)
            number = torch.full((1,), count, device=like.device)
            averages = [_averages(one.expand(1, length), number, count, like) for length in (queries, keys)]
            return cls(*averages)
        real_queries = real[:, past:] if queries == keys - past else real.new_ones(real.shape[0], queries)
        totals = real_queries.sum(-1), real.sum(-1)
        number = torch.minimum(*totals).clamp(max=count)  # [B]
        used = torch.arange(count, device=like.device) < number[:, None]
        return cls(
            _averages(real_queries, number, count, like),
            _averages(real, number, count, like),
            used,
            (used | ~used.any(-1, keepdim=True))[:, None, None],
            (real | ~real.any(-1, keepdim=True))[:, None, None],
            ((number == totals[0]) & (number == totals[1]))[:, None, None, None],
        )


def _averages(real: Tensor, number: Tensor, count: int, like: Tensor) -> Tensor:
    """Return ``[B, m, L]``: the t-th of r real tokens goes to landmark ⌊t·number / r⌋, weighted by 1 / its members."""
    place = real.cumsum(-1) - 1  # [B, L]
    total = real.sum(-1, keepdim=True).clamp(min=1)
    segment = (place * number[:, None]).div(total, rounding_mode="floor").masked_fill(~real, -1)
    members = segment[:, None] == torch.arange(count, device=real.device)[:, None]  # [B, m, L]
    return members.to(like.dtype) / members.sum(-1, keepdim=True).clamp(min=1)


def _mean(averages: Tensor, x: Tensor) -> Tensor:
    """Average ``[B, heads, L, D]`` to ``[B, heads, m, D]``, all heads of a sequence in one product."""
    beside = x.transpose(1, 2).flatten(2)  # [B, L, heads·D]
    means = averages.expand(x.shape[0], -1, -1) @ beside
    return means.view(x.shape[0], averages.shape[1], x.shape[1], x.shape[3]).transpose(1, 2)


def _softmax(scores: Tensor, seen: Tensor | None) -> Tensor:
    return (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).softmax(-1)


def _inverse(x: Tensor, iterations: int) -> Tensor:
    """The Moore-Penrose inverse of ``[..., m, m]``, rows summing to 1, by an iteration of third order.

    From Z = xᵀ / (‖x‖₁ ‖x‖_∞), each matrix by its own norms: Z ← ¼ Z (13 − xZ (15 − xZ (7 − xZ))).
    Source: Razavi et al. 2014, as used by Xiong et al. 2021, section 3.2.
    """
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    z = x.mT / x.sum(-2).amax(-1)[..., None, None]
    for _ in range(iterations):
        xz = x @ z
        z = 0.25 * z @ (13 * identity - xz @ (15 * identity - xz @ (7 * identity - xz)))
    return z


def nystrom_cost(x: Extent, options: spec.Nystrom) -> MethodCost:
    """Count means, three products with landmarks, four m × m products an iteration, and two with the values.

    Elementwise: scale 1 for each of the queries; softmax 5 (backward 4) for each of the three matrices' entries; 7 an
    iteration and entry (three identities scaled and subtracted from, and a quarter).
    """
    m, heads = min(options.landmarks, x.queries, x.keys), x.batch * x.heads
    q = heads * x.queries * x.head_dim
    if not x.padded and m == x.queries == x.keys:
        pairs = heads * m * m
        forward = MethodFlops(2 * pairs * x.head_dim, 2 * pairs * x.value_dim, q + 5 * pairs)
        backward = MethodFlops(4 * pairs * x.head_dim, 4 * pairs * x.value_dim, q + 4 * pairs)
        return MethodCost(forward, backward)
    left, right, middle = heads * x.queries * m, heads * m * x.keys, heads * m * m
    means = 2 * x.batch * m * (x.queries * x.heads * x.head_dim + x.keys * x.kv_heads * x.head_dim)
    scores = 2 * (left + middle + right) * x.head_dim + (8 * options.iterations * middle + 2 * left) * m
    values = 2 * (left + right) * x.value_dim
    entries = left + middle + right
    elementwise = q + 5 * entries + (7 * options.iterations + 2) * middle
    # Of the means' factors, only the tokens have a gradient.
    backward = MethodFlops(means + 2 * scores, 2 * values, q + 4 * entries + 2 * (7 * options.iterations + 2) * middle)
    return MethodCost(
        MethodFlops(means + scores, values, elementwise),
        backward,
        steps=options.iterations,
    )

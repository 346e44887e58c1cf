"""Sparse projections onto the simplex, exact by sorting, with gradients that can be differentiated again.

The maximum is taken off the scores, so that 0 is the largest. The threshold τ is then at least −1, where the largest
score alone would give the sum 1. What lies at −1 or lower has weight 0, and may be taken for −1 while τ is found, so
that no infinity is summed. A row of −∞ alone stays so, and gets zeros.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def sparsemax(x: Tensor, temperature: float = 1.0) -> Tensor:
    """The distribution nearest to x/T over the last dimension; zeros for a row of −∞.

    Source: Martins & Astudillo 2016, eq. 3 and algorithm 1.
    """
    weights: Tensor = _Sparsemax.apply(x, temperature)  # type: ignore[no-untyped-call]
    return weights


def entmax15_roots(x: Tensor, temperature: float = 1.0) -> Tensor:
    """The roots of 1.5-entmax, max(x/2T − τ, 0) over the last dimension; zeros for a row of −∞.

    The weights are their squares. Source: Peters et al. 2019, section 3.2.
    """
    roots: Tensor = _Entmax15Roots.apply(x, temperature)  # type: ignore[no-untyped-call]
    return roots


class _Sparsemax(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, temperature: float) -> Tensor:
        z = _below_maximum(x, temperature)
        weights = z.sub_(_sparsemax_threshold(z)).clamp_(min=0)
        ctx.temperature = temperature
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """∂x = s ⊙ (∂w − mean of ∂w over the support), s the support (eq. 14)."""
        (weights,) = ctx.saved_tensors
        support = weights > 0
        mean = (gradient * support).sum(-1, keepdim=True) / support.sum(-1, keepdim=True, dtype=torch.int32).clamp(
            min=1
        )
        return _divided((gradient - mean).masked_fill_(~support, 0), ctx.temperature), None


class _Entmax15Roots(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, temperature: float) -> Tensor:
        z = _below_maximum(x, temperature).div_(2)
        roots = z.sub_(_entmax15_threshold(z)).clamp_(min=0)
        ctx.temperature = temperature
        ctx.save_for_backward(roots)
        return roots

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Σ r² = 1 makes ∂τ/∂z_j = r_j / Σ r, so that ∂z = s ⊙ ∂r − r · Σ_support ∂r / Σ r; z = x/2T."""
        (roots,) = ctx.saved_tensors
        inside = gradient.masked_fill(roots == 0, 0)
        total = roots.sum(-1, keepdim=True)
        share = inside.sum(-1, keepdim=True) / total.masked_fill(total == 0, 1)
        return _divided(inside.addcmul_(roots, share, value=-1), 2 * ctx.temperature), None


def _below_maximum(x: Tensor, temperature: float) -> Tensor:
    """A new tensor: (x − max x) / T; −∞ where x is."""
    if not x.shape[-1]:
        return x.clone()
    highest = x.amax(-1, keepdim=True)
    z = x - highest.masked_fill(highest == -torch.inf, 0)
    return _divided(z, temperature)


def _divided(x: Tensor, by: float) -> Tensor:
    return x if by == 1 else x.div_(by)


def _sparsemax_threshold(z: Tensor) -> Tensor:
    """τ ``[..., 1]`` for which Σ max(z − τ, 0) = 1: the largest k with 1 + k·z_(k) > Σ_{j≤k} z_(j) gives it."""
    if not z.shape[-1]:
        return z.new_zeros(*z.shape[:-1], 1)
    ordered = z.sort(-1, descending=True).values.clamp_(min=-1)
    sums = ordered.cumsum(-1)
    count = _count(ordered.mul_(_ranks(z)).add_(1).gt_(sums))
    return (sums.gather(-1, count - 1) - 1) / count


def _entmax15_threshold(z: Tensor) -> Tensor:
    """τ ``[..., 1]`` for which Σ max(z − τ, 0)² = 1: of the k largest, mean − √((1 − k·variance) / k)."""
    if not z.shape[-1]:
        return z.new_zeros(*z.shape[:-1], 1)
    ordered = z.sort(-1, descending=True).values.clamp_(min=-1)
    ranks = _ranks(z)
    spread = ordered.square().cumsum_(-1)
    means = ordered.cumsum(-1).div_(ranks)
    spread.div_(ranks).addcmul_(means, means, value=-1)  # the variance of the k largest
    thresholds = means.sub_(spread.neg_().add_(ranks.reciprocal()).clamp_(min=0).sqrt_())
    count = _count(ordered.ge_(thresholds))
    return thresholds.gather(-1, count - 1)


def _count(ones: Tensor) -> Tensor:
    """Count the ones of a row, at least 1: as floats, since the sum of integers would copy them."""
    return ones.sum(-1, keepdim=True).long().clamp_(min=1)


def _ranks(z: Tensor) -> Tensor:
    """1, 2, … as many as keys."""
    return torch.arange(1, z.shape[-1] + 1, dtype=z.dtype, device=z.device)

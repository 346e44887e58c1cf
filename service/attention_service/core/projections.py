"""Sparse projections onto the simplex, exact by sorting, with gradients that can be differentiated again.

The maximum is taken off the scores, so that 0 is the largest. The threshold τ is then at least −1, where the largest
score alone would give the sum 1. What lies at −1 or lower has weight 0, and may be taken for −1 while τ is found, so
that no infinity is summed. A row of −∞ alone stays so, and gets zeros.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from attention_service.core import steps
from attention_service.core.tape import BOOL, INTEGER, Sketch, Tape


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


def sketched_sparsemax(tape: Tape, x: Sketch, temperature: float) -> Sketch:
    """``sparsemax``, step by step: shifted, sorted, summed, counted, and less the threshold."""
    z, row = _shifted(tape, x, temperature)
    ordered = _ordered(tape, z)
    sums = steps.plain(tape, ordered)
    ranks = steps.filled(tape, x.dims[-1:], x.itemsize)
    steps.changed(tape, ordered, ranks)
    steps.changed(tape, ordered)
    steps.changed(tape, ordered, sums)
    count = _counted(tape, ordered, row)
    picked = _picked(tape, count, row)
    steps.changed(tape, z, steps.plain(tape, steps.plain(tape, picked), count, itemsize=x.itemsize))
    steps.changed(tape, z)

    def step() -> None:
        gradient = Sketch(x.dims, x.itemsize)
        support = steps.plain(tape, z, itemsize=BOOL)
        inside = steps.plain(tape, gradient, support)
        among = steps.plain(tape, steps.reduced(tape, support, row.dims, 4))
        mean = steps.plain(tape, steps.reduced(tape, inside, row.dims), among)
        found = steps.plain(tape, gradient, mean)
        steps.changed(tape, found, steps.plain(tape, support))
        _divided_sketch(tape, found, temperature)
        tape.give(x, x.size)

    return tape.later(z, step) if z.tracked else z


def sketched_roots(tape: Tape, x: Sketch, temperature: float) -> Sketch:
    """``entmax15_roots``, step by step: two running sums, their means, the roots, and less the threshold."""
    z, row = _shifted(tape, x, temperature)
    steps.changed(tape, z)
    ordered = _ordered(tape, z)
    ranks = steps.filled(tape, x.dims[-1:], x.itemsize)
    spread = steps.changed(tape, steps.plain(tape, ordered))
    means = steps.changed(tape, steps.plain(tape, ordered), ranks)
    steps.changed(tape, spread, ranks)
    steps.changed(tape, spread, means)
    steps.changed(tape, spread)
    steps.changed(tape, spread, steps.plain(tape, ranks))
    steps.changed(tape, spread)
    steps.changed(tape, spread, functions=1)
    steps.changed(tape, means, spread)
    steps.changed(tape, ordered, means)
    count = _counted(tape, ordered, row)
    steps.changed(tape, z, _picked(tape, count, row))
    steps.changed(tape, z)

    def step() -> None:
        inside = steps.plain(tape, Sketch(x.dims, x.itemsize), steps.plain(tape, z, itemsize=BOOL))
        total, above = steps.reduced(tape, z, row.dims), steps.reduced(tape, inside, row.dims)
        filled = steps.plain(tape, total, steps.plain(tape, total, itemsize=BOOL))
        steps.changed(tape, inside, z, steps.plain(tape, above, filled))
        _divided_sketch(tape, inside, 2 * temperature)
        tape.give(x, x.size)

    return tape.later(z, step) if z.tracked else z


def _shifted(tape: Tape, x: Sketch, temperature: float) -> tuple[Sketch, Sketch]:
    """What ``_below_maximum`` gives, and a number for each row."""
    row = steps.reduced(tape, x, (*x.dims[:-1], 1))
    highest = steps.plain(tape, row, steps.plain(tape, row, itemsize=BOOL))
    z = steps.plain(tape, x, highest)
    z.tracked = x.tracked
    _divided_sketch(tape, z, temperature)
    return z, row


def _divided_sketch(tape: Tape, x: Sketch, by: float) -> None:
    if by != 1:
        steps.changed(tape, x)


def _ordered(tape: Tape, z: Sketch) -> Sketch:
    """Sorted, with the places from which they come, and cut off at −1."""
    tape.does(z.bytes, z.bytes + z.size * INTEGER)
    return steps.changed(tape, Sketch(z.dims, z.itemsize))


def _counted(tape: Tape, ones: Sketch, row: Sketch) -> Sketch:
    count = steps.plain(tape, steps.reduced(tape, ones, row.dims), itemsize=INTEGER)
    return steps.changed(tape, count)


def _picked(tape: Tape, count: Sketch, row: Sketch) -> Sketch:
    return steps.plain(tape, row, steps.plain(tape, count))


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
    """How many ones a row has, and at least 1: counted as floats, since integers would be copied to be summed."""
    return ones.sum(-1, keepdim=True).long().clamp_(min=1)


def _ranks(z: Tensor) -> Tensor:
    """1, 2, … as many as keys."""
    return torch.arange(1, z.shape[-1] + 1, dtype=z.dtype, device=z.device)

"""States as sums of other states, told by their numbers."""

from collections.abc import Sequence
from itertools import combinations
from typing import Final

import torch
from torch import Tensor

from attention_service.core.tensors import wide

SUMMANDS: Final = 2
"""Outputs of other modules that a layer may add beside its attention, where the sum is all that shows how it adds."""

_MOST_ALIKE: Final = 1e12
"""The condition of summands of length 1 that cannot be told apart."""


def tolerance_of(dtype: torch.dtype) -> float:
    """The difference of two equal states of a model with this dtype, relative to their size."""
    return 1e-4 if dtype.itemsize > 2 else 0.05


def same(one: Tensor, other: Tensor | None, tolerance: float) -> bool:
    """True if two states are equal."""
    if other is None or one.shape != other.shape:
        return False
    return bool((wide(one) - wide(other)).norm() <= tolerance * wide(one).norm())


def ratio_of(one: Tensor, other: Tensor, tolerance: float) -> float | None:
    """The number by which a state was multiplied to make another; None if there is none."""
    if one.shape != other.shape:
        return None
    ratio = float((one * other).sum() / other.square().sum())
    ratio = 1.0 if abs(ratio - 1) < tolerance else ratio
    return ratio if bool((one - ratio * other).norm() <= tolerance * one.norm()) else None


def factors_beside(
    total: Tensor, parts: Sequence[Tensor], others: Sequence[Tensor], tolerance: float
) -> list[float] | None:
    """The factors by which parts sum to a state, with at most two other states beside them; None if they do not."""
    for count in range(SUMMANDS + 1):
        for beside in combinations(others, count):
            if factors := factors_of(total, parts, beside, tolerance):
                return factors
    return None


def factors_of(
    total: Tensor, parts: Sequence[Tensor], beside: Sequence[Tensor], tolerance: float
) -> list[float] | None:
    """The factors by which parts, and others beside them, sum to a state; None if they do not."""
    columns = torch.stack([x.reshape(-1).double() for x in (*parts, *beside)], 1)
    wanted = total.reshape(-1).double()
    sizes = columns.norm(dim=0)
    if not bool(sizes.isfinite().all()) or not bool(sizes.all()) or not bool(wanted.isfinite().all()):
        return None
    columns = columns / sizes
    gram = columns.T @ columns
    if float(torch.linalg.cond(gram)) > _MOST_ALIKE:
        return None
    solved = torch.linalg.solve(gram, columns.T @ wanted)
    if bool((columns @ solved - wanted).norm() > tolerance * wanted.norm()):
        return None
    factors = [1.0 if abs(x - 1) < 10 * tolerance else x for x in (solved / sizes)[: len(parts)].tolist()]
    return factors if all(abs(x) > 10 * tolerance for x in factors) else None


def are_summed(total: Tensor, others: Sequence[Tensor], tolerance: float, like: Tensor) -> bool:
    """True if a state is a sum of at most two others, times factors, or nothing beside a state ``like`` it."""
    if bool(total.norm() <= tolerance * like.norm()):
        return True
    chosen = (summands for count in range(1, SUMMANDS + 1) for summands in combinations(others, count))
    return any(factors_of(total, summands, (), tolerance) for summands in chosen)

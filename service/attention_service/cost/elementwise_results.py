"""Answers on the meta device of operations that make one element of one of each tensor."""

from typing import Any

import torch
from torch import Tensor

from attention_service.cost.lying import broadcast, rows, together


def elementwise(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return the result of an operation on floating-point tensors of one dtype."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    dtype = tensors[0].dtype
    if not dtype.is_floating_point or any(x.dtype != dtype for x in tensors):
        return None
    return broadcast(tensors, dtype)


def kept(*args: Any, **kwargs: Any) -> Tensor:
    """In the dtype of the first, whole numbers included."""
    return broadcast([x for x in args if isinstance(x, Tensor)], args[0].dtype)


def arithmetic(x: Any, y: Any, **kwargs: Any) -> Tensor:
    """Return the result for two tensors, or a tensor and a number, in their common dtype."""
    tensors = [each for each in (x, y) if isinstance(each, Tensor)]
    return broadcast(tensors, torch.result_type(x, y), with_number=len(tensors) == 1)


def divided(x: Any, y: Any, *, rounding_mode: str | None = None) -> Tensor | None:
    """Whole numbers are divided into whole ones only where that is asked for."""
    found = arithmetic(x, y)
    return found if found.is_floating_point() or rounding_mode else None


def compared(*args: Any) -> Tensor:
    """Yes or no."""
    return broadcast([x for x in args if isinstance(x, Tensor)], torch.bool)


def chosen(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """One or the other."""
    return broadcast([condition, x, y], torch.result_type(x, y))


def filled(x: Tensor, mask: Tensor, value: object) -> Tensor:
    """A copy, row by row, that is filled."""
    return rows(together(x.shape, mask.shape), x.dtype)

"""Strides of the results of operations, as tensors on the meta device."""

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor


def rows(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor."""
    return torch.empty(shape, dtype=dtype, device="meta")


def laid(shape: Sequence[int], order: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a dense tensor whose dimensions have this order in memory."""
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def broadcast(tensors: Sequence[Tensor], dtype: torch.dtype, *, with_number: bool = False) -> Tensor:
    """Return the elementwise result over broadcast tensors, with the strides of TensorIterator.

    with_number: one more argument is a number, which is broadcast too.
    """
    shape: Sequence[int] = tensors[0].shape
    if different := any(x.shape != shape for x in tensors):
        shape = together(*(x.shape for x in tensors))
    # Dimensions of one element keep their strides, unless all arguments have one shape.
    if all(x.is_contiguous() for x in tensors) and (1 not in shape or not (different or with_number)):
        return rows(shape, dtype)
    strides = [_strides(x, shape) for x in tensors]
    order = [*reversed(range(len(shape)))]  # fastest dimension first
    for last in range(1, len(order)):
        at = last
        for before in reversed(range(last)):
            slower = _slower(order[before], order[at], strides, shape)
            if slower < 0:
                break
            if slower > 0:
                order[before], order[at] = order[at], order[before]
                at = before
    return laid(shape, order, dtype)


def together(*shapes: Sequence[int]) -> Sequence[int]:
    """Return the shape to which these are broadcast."""
    backwards = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return [next((size for size in sizes if size != 1), 1) for sizes in backwards][::-1]


def _strides(x: Tensor, shape: Sequence[int]) -> list[int]:
    """Return the strides by dimension of the result; 0 for a dimension that is broadcast."""
    new = len(shape) - x.ndim
    own = zip(x.shape, shape[new:], x.stride(), strict=True)
    return [0] * new + [stride if size == wide else 0 for size, wide, stride in own]


def _slower(one: int, other: int, strides: Sequence[Sequence[int]], shape: Sequence[int]) -> int:
    """Compare the strides of two dimensions: above 0 to swap them, below 0 to keep them, 0 if no tensor decides."""
    for each in strides:
        if each[one] and each[other]:
            if each[one] != each[other]:
                return 1 if each[one] > each[other] else -1
            if shape[one] > shape[other]:
                return 1
    return 0

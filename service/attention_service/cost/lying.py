"""Tensors on the meta device: how the answers of operations lie there."""

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor


def rows(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Row by row."""
    return torch.empty(shape, dtype=dtype, device="meta")


def laid(shape: Sequence[int], order: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Without gaps, its dimensions in the order in which they change."""
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def broadcast(tensors: Sequence[Tensor], dtype: torch.dtype, *, with_number: bool = False) -> Tensor:
    """An answer for every element of tensors that are broadcast; it lies as TensorIterator lays it.

    with_number: one more argument is a number, which is broadcast too.
    """
    shape: Sequence[int] = tensors[0].shape
    if different := any(x.shape != shape for x in tensors):
        shape = together(*(x.shape for x in tensors))
    # Dimensions of one element keep their strides, unless all arguments have one shape.
    if all(x.is_contiguous() for x in tensors) and (1 not in shape or not (different or with_number)):
        return rows(shape, dtype)
    strides = [_strides(x, shape) for x in tensors]
    order = [*reversed(range(len(shape)))]  # the one that changes fastest first
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
    """The shape that these are broadcast to."""
    backwards = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return [next((size for size in sizes if size != 1), 1) for sizes in backwards][::-1]


def _strides(x: Tensor, shape: Sequence[int]) -> list[int]:
    """By dimension of the answer; 0 where one element stands for all."""
    new = len(shape) - x.ndim
    own = zip(x.shape, shape[new:], x.stride(), strict=True)
    return [0] * new + [stride if size == wide else 0 for size, wide, stride in own]


def _slower(one: int, other: int, strides: Sequence[Sequence[int]], shape: Sequence[int]) -> int:
    """Above 0 where a dimension is to change slower than another, below where faster, 0 where no tensor tells."""
    for each in strides:
        if each[one] and each[other]:
            if each[one] != each[other]:
                return 1 if each[one] > each[other] else -1
            if shape[one] > shape[other]:
                return 1
    return 0

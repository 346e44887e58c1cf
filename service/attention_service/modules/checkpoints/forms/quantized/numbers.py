"""Quantized numbers as floats: words of several numbers, and the scale and zero point of each block of them."""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from attention_contract.errors import InvalidCheckpoint
from attention_service.modules.checkpoints.forms.form import Read

PACKED_BITS: Final = 32
"""Bits of a word of several numbers."""


class Named(NamedTuple):
    """A tensor of a checkpoint, with its name for messages."""

    name: str
    values: Tensor


def named(read: Read, name: str) -> Named:
    """A tensor that a weight must have."""
    return Named(name, read(name))


def optional(read: Read, name: str) -> Named | None:
    """A tensor that a weight may have."""
    try:
        return Named(name, read(name))
    except KeyError:
        return None


def unpacked(x: Tensor, bits: int) -> Tensor:
    """Unsigned numbers ``[rows, columns · 32 / bits]``, as float, of int32 ``[rows, columns]``, lowest bits first."""
    shifts = torch.arange(0, PACKED_BITS, bits)
    numbers: Tensor = ((x.to(torch.int64)[:, :, None] >> shifts) & (2**bits - 1)).flatten(1).float()
    return numbers


def scaled(stored: Tensor, scale: Named, zero: Named | None = None, block: Sequence[int] | None = None) -> Tensor:
    """Numbers ``[rows, columns]`` less their zero point, times their scale.

    Each of these is for a block of so many rows and columns, by default of equal ones.
    """
    if zero is not None:
        stored = stored - spread(zero, stored, block)
    return stored * spread(scale, stored, block)


def spread(x: Named, stored: Tensor, block: Sequence[int] | None = None) -> Tensor:
    """Repeat a number of each block for all of it. Raises InvalidCheckpoint if there are too many or too few."""
    values = x.values.float()
    values = values.reshape(1, 1) if values.numel() == 1 else values
    values = values[:, None] if values.ndim == 1 else values
    sizes = zip(stored.shape, values.shape, block or (0, 0), strict=False)
    steps = [step if step and count > 1 else size // max(count, 1) for size, count, step in sizes]
    counts = [math.ceil(size / max(step, 1)) for size, step in zip(stored.shape, steps, strict=False)]
    if values.ndim != stored.ndim or counts != [*values.shape]:
        raise unlike(x.name, x.values.shape, stored.shape)
    for dim, step in enumerate(steps):
        values = values.repeat_interleave(step, dim).narrow(dim, 0, stored.shape[dim])
    return values


def unlike(name: str, shape: Sequence[int], stored: Sequence[int]) -> InvalidCheckpoint:
    """The error for a tensor of a module that does not fit its weight."""
    return InvalidCheckpoint.at(
        "checkpoint", f"{name} of shape {[*shape]} does not fit the stored weight of shape {[*stored]}"
    )


def checked_groups(order: Named, length: int, groups: int) -> Tensor:
    """The group of each column, by a tensor of their numbers. Raises InvalidCheckpoint for one that no scale has."""
    numbers = order.values.long()
    if numbers.shape != (length,):
        raise unlike(order.name, order.values.shape, (length,))
    low, high = int(numbers.min()), int(numbers.max())
    if low < 0 or high >= groups:
        raise InvalidCheckpoint.at(
            "checkpoint", f"{order.name} has groups {low} to {high}; expected 0 to {groups - 1}, one for each scale"
        )
    return numbers

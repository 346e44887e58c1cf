"""Quantized numbers as floats: words of several numbers, and the scale and zero point of each block of them."""

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from attention_contract.errors import InvalidCheckpoint

PACKED_BITS: Final = 32
"""Bits of a word of several numbers."""


def unpacked(x: Tensor, bits: int) -> Tensor:
    """Unsigned numbers ``[rows, columns · 32 / bits]``, as float, of int32 ``[rows, columns]``, lowest bits first."""
    shifts = torch.arange(0, PACKED_BITS, bits)
    found: Tensor = ((x.to(torch.int64)[:, :, None] >> shifts) & (2**bits - 1)).flatten(1).float()
    return found


def scaled(
    stored: Tensor, scale: Tensor, prefix: str, zero: Tensor | None = None, block: Sequence[int] | None = None
) -> Tensor:
    """Numbers ``[rows, columns]`` less their zero point, times their scale.

    Each of these is for a block of so many rows and columns, by default of equal ones.
    """
    if zero is not None:
        stored = stored - spread(zero, stored, prefix, block)
    return stored * spread(scale, stored, prefix, block)


def spread(x: Tensor, stored: Tensor, prefix: str, block: Sequence[int] | None) -> Tensor:
    """Repeat a number of each block for all of it. Raises InvalidCheckpoint if there are too many or too few."""
    each = x.float().reshape(1, 1) if x.numel() == 1 else x.float()
    each = each[:, None] if each.ndim == 1 else each
    sizes = zip(stored.shape, each.shape, block or (0, 0), strict=False)
    steps = [step if step and count > 1 else size // max(count, 1) for size, count, step in sizes]
    counts = [math.ceil(size / max(step, 1)) for size, step in zip(stored.shape, steps, strict=True)]
    if each.ndim != stored.ndim or counts != [*each.shape]:
        raise unlike(prefix, "scale", x.shape, stored.shape)
    for dim, step in enumerate(steps):
        each = each.repeat_interleave(step, dim).narrow(dim, 0, stored.shape[dim])
    return each


def unlike(prefix: str, part: str, found: Sequence[int], stored: Sequence[int]) -> InvalidCheckpoint:
    """The error for a part of a module that does not fit its weight."""
    return InvalidCheckpoint.at(
        "checkpoint", f"{prefix}{part} of shape {[*found]} does not fit the stored weight of shape {[*stored]}"
    )

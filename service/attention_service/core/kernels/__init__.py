"""Kernels: interchangeable ways to the same context."""

import torch

from attention_contract.spec import AttentionSpec
from attention_service.core.kernels import fused, materialized  # noqa: F401  # they register themselves
from attention_service.core.kernels.base import KERNELS, Kernel

__all__ = ["KERNELS", "Kernel", "unsuitable"]


def unsuitable(
    kernel: str,
    spec: AttentionSpec,
    dtype: torch.dtype,
    *,
    edits: bool = False,
    dropout: bool = False,
    taps_gradient: bool = False,
    double_backward: bool = False,
) -> str | None:
    """Why this kernel cannot do it, in words for the caller; None where it can.

    dtype is that of q, k and v; edits: some tap is edited; dropout: weights are dropped; taps_gradient: a gradient with
    respect to a tap other than q, k, v or context is wanted; double_backward: a gradient of a gradient is.
    """
    reasons = (
        KERNELS[kernel]
        .make()
        .unsuitable(
            spec, dtype, edits=edits, dropout=dropout, taps_gradient=taps_gradient, double_backward=double_backward
        )
    )
    return next(reasons, None)

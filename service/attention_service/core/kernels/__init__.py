"""Kernels: interchangeable ways to the same context."""

import torch

from attention_contract.spec import AttentionSpec
from attention_service.core.kernels import blocked, flex, fused, materialized  # noqa: F401  # they register themselves
from attention_service.core.kernels.base import KERNELS, Kernel, Needs

__all__ = ["KERNELS", "Kernel", "Needs", "unsuitable"]


def unsuitable(
    kernel: str,
    spec: AttentionSpec,
    dtype: torch.dtype,
    *,
    edits: bool = False,
    dropout: bool = False,
    taps_gradient: bool = False,
    double_backward: bool = False,
    device: str = "cpu",
) -> str | None:
    """Why this kernel cannot do it, in words for the caller; None where it can.

    dtype is that of q, k and v; the rest is what ``Needs`` says.
    """
    needs = Needs(edits, dropout, taps_gradient, double_backward, device)
    return next(KERNELS[kernel].make().unsuitable(spec, dtype, needs), None)

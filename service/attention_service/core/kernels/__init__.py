"""Kernels: interchangeable ways to the same context.

It imports the core's stages, masks and normalizers. Read ``base.py`` first.
"""

import torch

from attention_contract.spec import AttentionSpec
from attention_service.core.kernels import blocked, fused, materialized  # noqa: F401  # they register themselves
from attention_service.core.kernels.base import KERNELS, Kernel, KernelWork, Needs
from attention_service.core.kernels.materialized import MATERIALIZED

__all__ = ["KERNELS", "MATERIALIZED", "Kernel", "KernelWork", "Needs", "is_compiled", "unsuitable"]


def unsuitable(kernel: str, spec: AttentionSpec, dtype: torch.dtype, needs: Needs) -> str | None:
    """Say why this kernel cannot do it, in words for the caller; None if it can. ``dtype``: that of q, k and v."""
    return next(KERNELS[kernel].make().unsuitable(spec, dtype, needs), None)


def is_compiled(kernel: str) -> bool:
    """Return True for a kernel that is compiled for new shapes; a method that approximates is none."""
    return kernel in KERNELS and KERNELS[kernel].make().compiled

"""RMS norm of queries and keys."""

import torch
from torch import Tensor

from attention_contract.positions import QKNorm
from attention_service.core.problem import Learned, Widths

_HUGE = 2.0**60
"""From here on, a square or a sum of squares may overflow in float32."""
NAMES = ("q_norm.weight", "k_norm.weight")


def learned(norm: QKNorm | None, widths: Widths) -> dict[str, Learned]:
    """Return the weights of the norm, which start at a factor of 1."""
    if norm is None:
        return {}
    fill = 0.0 if norm.unit_offset else 1.0
    if norm.over == "head":
        sizes = (widths.head_dim, widths.key_dim)
    else:
        sizes = (widths.heads * widths.head_dim, widths.kv_heads * widths.key_dim)
    return {name: Learned((size,), fill=fill, heads=None) for name, size in zip(NAMES, sizes, strict=True)}


def normed(x: Tensor, weight: Tensor, norm: QKNorm) -> Tensor:
    """Divide x ``[B, H, L, D]`` by its root mean square, and multiply by the weight ``[D]`` or ``[H·D]``.

    The computation runs in float32 at least.

    Source: Zhang & Sennrich 2019, eq. 4; of queries and keys: Henry et al. 2020.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    along = (-1,) if norm.over == "head" else (1, -1)
    largest = wide.detach().abs().amax(along, keepdim=True)  # [B, 1 or H, L, 1]
    unit = largest.masked_fill(largest < _HUGE, 1)  # divided out, so that no square overflows
    wide = wide / unit
    scale = torch.rsqrt(wide.square().mean(along, keepdim=True) + norm.eps / unit.square())
    weight = weight.to(wide.dtype)
    if norm.over == "all_heads":
        weight = weight.view(x.shape[1], 1, x.shape[3])
    return (wide * scale * (1 + weight if norm.unit_offset else weight)).to(x.dtype)

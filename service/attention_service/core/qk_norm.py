"""The norm of queries and keys: each divided by its root mean square, and weighed."""

import torch
from torch import Tensor

from attention_contract.positions import QKNorm
from attention_service.core.types import Learned, Widths

NAMES = ("q_norm.weight", "k_norm.weight")


def learned(norm: QKNorm | None, widths: Widths) -> dict[str, Learned]:
    """Its weights, which begin with the factor 1."""
    if norm is None:
        return {}
    fill = 0.0 if norm.unit_offset else 1.0
    if norm.over == "head":
        return {name: Learned((widths.head_dim,), fill=fill, heads=None) for name in NAMES}
    counts = (widths.heads, widths.kv_heads)
    return {
        name: Learned((count * widths.head_dim,), fill=fill, heads=None)
        for name, count in zip(NAMES, counts, strict=True)
    }


def normed(x: Tensor, weight: Tensor, norm: QKNorm) -> Tensor:
    """X ``[B, H, L, D]`` over its root mean square, times the weight ``[D]`` or ``[H·D]``; in float32 at least.

    Source: Zhang & Sennrich 2019, eq. 4; of queries and keys: Henry et al. 2020.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    along = (-1,) if norm.over == "head" else (1, -1)
    scale = torch.rsqrt(wide.square().mean(along, keepdim=True) + norm.eps)  # [B, 1 or H, L, 1]
    weight = weight.to(wide.dtype)
    if norm.over == "all_heads":
        weight = weight.view(x.shape[1], 1, x.shape[3])
    return (wide * scale * (1 + weight if norm.unit_offset else weight)).to(x.dtype)

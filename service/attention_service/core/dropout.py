"""Reproducible dropout of weights: the kept weights depend on the seed and their place alone.

Source: Srivastava et al. 2014; on attention weights: Vaswani et al. 2017, section 5.4.
"""

import torch
from torch import Tensor

from attention_service.core.noise import mixed, noise
from attention_service.core.types import Dropout


def kept(dropout: Dropout, batch: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Bool ``[B, H, Q, K]``: which weights are kept, by their indices; the same on every device and in every block.

    batch ``[B]``, heads ``[H]``, queries ``[Q]``, keys ``[K]``: the requested integer indices.
    """
    head = noise(dropout.seed, batch[:, None] * 2**31 + heads, 0)  # [B, H]
    row = mixed(head[..., None], queries)
    return mixed(row[..., None], keys) >= round(dropout.p * 2**32)


def dropped(weights: Tensor, dropout: Dropout, keep: Tensor) -> Tensor:
    """The kept weights, divided by 1 − p, and zeros."""
    return torch.where(keep, weights / (1 - dropout.p), 0)

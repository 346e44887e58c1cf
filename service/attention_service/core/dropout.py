"""Reproducible dropout of weights: the kept weights depend on the seed and their place alone.

The numbers that decide are a function of where they stand: the same on every device, and in any order.

Source: Srivastava et al. 2014; on attention weights: Vaswani et al. 2017, section 5.4.
"""

import torch
from torch import Tensor

from attention_service.core.problem import WeightDropout

_LOW = 2**32 - 1


def kept(dropout: WeightDropout, batch: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Bool ``[B, H, Q, K]``: which weights are kept, by their indices; the same on every device and in every block.

    batch ``[B]``, heads ``[H]``, queries ``[Q]``, keys ``[K]``: the requested integer indices.
    """
    head = noise(dropout.seed, batch[:, None] * 2**31 + heads, 0)  # [B, H]
    row = mixed(head[..., None], queries)
    return mixed(row[..., None], keys) >= round(dropout.p * 2**32)


def dropped(weights: Tensor, dropout: WeightDropout, keep: Tensor) -> Tensor:
    """The kept weights, divided by 1 − p, and zeros."""
    return torch.where(keep, weights / (1 - dropout.p), 0)


def noise(seed: int, row: Tensor, draw: Tensor | int) -> Tensor:
    """A number below 2³² for each row and draw, broadcast, in integer arithmetic that no device does differently.

    Each of the words seed, row (low, then high 32 bits) and draw (likewise) is mixed in by h ← mix(((h xor word) +
    0x9e3779b9) mod 2³²), from h = 0, with mix: h ← h xor h >> 16; h ← h · 0x21f0aaad mod 2³²; h ← h xor h >> 15;
    h ← h · 0x735a2d97 mod 2³²; h ← h xor h >> 15. No product reaches 2⁶³.
    """
    words = (torch.full_like(row, seed), row & _LOW, row >> 32 & _LOW, draw & _LOW, draw >> 32)
    state = torch.zeros_like(row)
    for word in words:
        state = mixed(state, word)
    return state


def mixed(state: Tensor, word: Tensor | int) -> Tensor:
    """The next state once a word below 2³² is mixed in."""
    state = (state ^ word) + 0x9E3779B9 & _LOW
    state = (state ^ state >> 16) * 0x21F0AAAD & _LOW
    state = (state ^ state >> 15) * 0x735A2D97 & _LOW
    return state ^ state >> 15

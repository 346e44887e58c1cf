"""Weights that Longformer and LED's encoder return by windows, as matrices over all pairs of tokens."""

import torch
from torch import Tensor


def dense(weights: Tensor, side: int, far: Tensor | None = None, of_far: Tensor | None = None) -> Tensor:
    """Return weights ``[B, H, L, L]`` of those by windows ``[B, H, L, G + 2 · side + 1]``, one query at a time.

    far: bool ``[B, L]``, the global tokens, of which a sequence has at most G; of_far ``[B, H, Lk, G]``: the weights of
    their rows.
    """
    batch, heads, length, width = weights.shape
    most = width - 2 * side - 1
    found = torch.zeros(batch, heads, length, length)
    for text in range(batch):
        listed = [] if far is None else far[text].nonzero().flatten().tolist()
        for query in range(length):
            row = weights[text, :, query]
            for place in range(2 * side + 1):
                if 0 <= (key := query - side + place) < length:
                    found[text, :, query, key] += row[:, most + place]
            for number, key in enumerate(listed):
                found[text, :, query, key] += row[:, number]
        for number, query in enumerate(listed):
            found[text, :, query] = of_far[text, :, :length, number]
    return found

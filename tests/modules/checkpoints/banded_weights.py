"""Longformer's weights as a dense matrix: transformers returns bands, columns of global keys, and global rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def dense_from(global_mask: Tensor) -> Callable[[tuple[Any, ...]], Tensor]:
    """Make the function that takes the results of a self-attention to its weights ``[B, H, S, S]``.

    ``global_mask`` is ``[B, S]``, with equally many global tokens in each sequence. The results are the output, the
    probabilities of ``[B, S, H, G + 2w + 1]`` (G global keys, then the band of w keys on each side), and the rows
    ``[B, H, G, S]`` of global queries.
    """
    tokens = [row.nonzero()[:, 0].tolist() for row in global_mask]

    def dense(results: tuple[Any, ...]) -> Tensor:
        _, bands, rows = results
        batch, length, heads, columns = bands.shape
        weights = torch.zeros(batch, heads, length, length, dtype=bands.dtype)
        for one, positions in enumerate(tokens):
            many = len(positions)
            side = (columns - many - 1) // 2
            for query in range(length):
                weights[one, :, query, positions] = bands[one, query, :, :many]
                first, end = max(0, query - side), min(length, query + side + 1)
                start = many + first - query + side
                weights[one, :, query, first:end] += bands[one, query, :, start : start + end - first]
            weights[one, :, positions] = rows[one, :, :many]
        return weights

    return dense

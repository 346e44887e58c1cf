"""Weights pooled by maximum over squares of queries and keys, so that those of long sequences need not be in memory."""

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from attention_service.core.blocks import placed_tiles, some_of
from attention_service.core.inspection.weights import Weights
from attention_service.core.problem import Problem, Selection


def pooled_weights(problem: Problem, selection: Selection, size: int, weights: Weights) -> Tensor:
    """Return the largest weight of each square of ``size`` queries and keys: ``[B, H, ⌈Q/size⌉, ⌈K/size⌉]``."""
    batch, every, rows, _ = problem.q.shape
    heads = every if selection.heads is None else len(selection.heads)
    queries = rows if selection.queries is None else len(selection.queries)
    shape = batch, heads, -(-queries // size), -(-problem.k.shape[2] // size)
    dtype = torch.promote_types(problem.q.dtype, torch.float32)
    found = problem.q.new_full(shape, -torch.inf, dtype=dtype)
    for tile, of_heads, of_queries in some_of(problem.q, placed_tiles(problem, selection)):
        values = weights(tile).to(dtype)  # [B, h, r, K]
        across = max_pool1d(values.flatten(0, 1), size, ceil_mode=True)
        across = across.reshape(*values.shape[:3], shape[3])
        for square in range(of_queries.start // size, -(-of_queries.stop // size)):
            rows_of = slice(
                max(square * size - of_queries.start, 0), min((square + 1) * size, of_queries.stop) - of_queries.start
            )
            place = found[:, of_heads, square]
            place.copy_(torch.maximum(place, across[:, :, rows_of].amax(2)))
    return found


def pooled_differences(problem: Problem, selection: Selection, size: int, weights: Weights, without: Weights) -> Tensor:
    """Return the difference of largest magnitude of each square, with its sign."""

    def changed(tile: Selection) -> Tensor:
        return weights(tile) - without(tile)

    highest = pooled_weights(problem, selection, size, changed)
    lowest = -pooled_weights(problem, selection, size, lambda tile: -changed(tile))
    return torch.where(-lowest > highest, lowest, highest)

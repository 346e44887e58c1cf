"""Statistics of one head's weights ``[Q, K]`` as scientists write them by hand: loops in float64."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.float64]


def received(weights: Weights, visible: NDArray[np.bool_]) -> Weights:
    """The mean weight of each key over the queries that may see it; rows that do not count have none."""
    found = np.full(weights.shape[1], np.nan)
    for key in range(weights.shape[1]):
        seen = [weights[query, key] for query in range(len(weights)) if visible[query, key]]
        if seen:
            found[key] = sum(seen) / len(seen)
    return found


def of_pairs(
    weights: Weights, pairs: Sequence[Sequence[int]], candidates: Sequence[int] | None = None
) -> dict[str, float]:
    """The six numbers of pairs, over weights of the same queries and keys."""
    sides = {"": (weights, pairs, candidates)}
    queries = None if candidates is None else sorted({query for query, _ in pairs})
    sides["swapped_"] = (weights, [(key, query) for query, key in pairs], queries)
    sides["both_"] = (weights + weights.T, pairs, candidates)
    found = {}
    for prefix, (matrix, chosen, among) in sides.items():
        shares, firsts = [], []
        for query, key in chosen:
            best = max(among if among is not None else range(matrix.shape[1]), key=lambda j: matrix[query, j])
            shares.append(matrix[query, key])
            firsts.append(best == key and matrix[query, key] != 0)
        found |= {f"{prefix}share": float(np.mean(shares)), f"{prefix}first": float(np.mean(firsts))}
    return found


def corrected(weights: Weights) -> Weights:
    """W + wᵀ with the average product correction, number by number."""
    both = weights + weights.T
    total = sum(both[i, j] for i in range(len(both)) for j in range(len(both)))
    found = np.empty_like(both)
    for i in range(len(both)):
        for j in range(len(both)):
            found[i, j] = both[i, j] - sum(both[i]) * sum(both[:, j]) / total
    return found

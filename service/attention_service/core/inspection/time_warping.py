"""Alignment of tokens with times by their attention: dynamic time warping over the weights of some heads.

Notation: N heads, T tokens, F frames. Source: the alignment of OpenAI's Whisper (``timing.py``, 2022), after Giorgino,
Computing and Visualizing Dynamic Time Warping Alignments in R, 2009.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


def warped_frames(weights: Tensor, width: int = 7) -> NDArray[np.int64]:
    """Return the first frame ``[T]`` of each token on the path of the largest weights ``[N, T, F]``.

    Each frame of a head is normed over the tokens, and smoothed by a median of ``width`` frames.
    """
    deviation, mean = torch.std_mean(weights.double(), 1, keepdim=True, correction=0)
    normed = (weights.double() - mean) / deviation.where(deviation > 0, 1.0)
    smoothed = _median(normed, width).mean(0)
    rows, frames = warping_path(-smoothed.cpu().numpy())
    return frames[np.flatnonzero(np.diff(rows, prepend=-1))]


def _median(x: Tensor, width: int) -> Tensor:
    """The median of each frame and those around it; of fewer frames than half of ``width``, the frames as they are."""
    half = width // 2
    if half == 0 or x.shape[-1] <= half:
        return x
    padded = nn.functional.pad(x, (half, half), mode="reflect")
    return padded.unfold(-1, width, 1).sort()[0][..., half]


def warping_path(costs: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return rows and columns of the cheapest path from the first entry of ``costs [T, F]`` to the last.

    A step goes to the next row, the next column, or both, which is taken only if it is cheaper than either. The costs
    of one diagonal depend on the two before alone, so each is computed at once.
    """
    rows, columns = costs.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    total[0, 0] = 0.0
    steps = np.full((rows + 1, columns + 1), _LEFT, np.int8)
    for diagonal in range(2, rows + columns + 1):
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        both, up, left = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        step = np.where((both < up) & (both < left), _BOTH, np.where((up < both) & (up < left), _UP, _LEFT))
        steps[i, j] = step
        total[i, j] = costs[i - 1, j - 1] + np.choose(step, [both, up, left])
    steps[0, :], steps[:, 0] = _LEFT, _UP
    at, path = (rows, columns), []
    while at > (0, 0):
        path.append((at[0] - 1, at[1] - 1))
        down, across = _MOVES[steps[at]]
        at = at[0] - down, at[1] - across
    places = np.array([pair for pair in reversed(path) if min(pair) >= 0], np.int64)
    return places[:, 0], places[:, 1]


_BOTH, _UP, _LEFT = 0, 1, 2
_MOVES = ((1, 1), (1, 0), (0, 1))
"""Rows and columns of each step."""

"""Measured over predicted times of the last runs of one kind, and the factor that follows."""

import math
from collections import deque
from typing import Final

import numpy as np

from attention_service.cost import Factor

FEWEST: Final = 5
"""Runs from which a kind has a factor."""
_KEPT: Final = 64
"""Last runs of a kind."""
_HALF_WAY_RUNS, _WIDE_BOUND = 16, math.log(2.0)
"""With this many runs, the bounds lie half-way between those of the runs and a factor of 2."""
_LEVEL: Final = 4.0
"""Spread of the logarithms of predicted times, as a sum of squares, at which half of the slope counts: runs that are
alike tell little of it."""
_STEEPEST: Final = 0.75
"""The largest slope, of either sign; below 1, so that longer predictions stay longer."""


class RunRatios:
    """The last runs of one kind."""

    def __init__(self, recent: int = _KEPT) -> None:
        """``recent``: the last runs from which the median follows; the slope and the bounds follow from all."""
        self._recent = recent
        self._seen: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        """Natural logarithms of the predicted seconds, without a factor, and of measured over predicted time."""

    def note(self, predicted: float, measured: float) -> None:
        """Take in a run: seconds, predicted without a factor. Times of zero tell nothing."""
        if predicted > 0 and measured > 0:
            self._seen.append((math.log(predicted), math.log(measured / predicted)))

    def factor(self) -> Factor | None:
        """Return the factor; None before ``FEWEST`` runs."""
        if len(self._seen) < FEWEST:
            return None
        sizes, ratios = np.array(self._seen).T
        away = sizes - np.median(sizes)
        slope = float(away @ (ratios - np.median(ratios)) / (away @ away + _LEVEL))
        slope = min(max(slope, -_STEEPEST), _STEEPEST)
        levels = ratios - slope * away
        middle = float(np.median(levels[-self._recent :]))
        low, high = np.quantile(levels, (0.05, 0.95)).tolist()
        short, long = (middle + slope * float(end) for end in (away.min(), away.max()))
        share = len(self._seen) / (len(self._seen) + _HALF_WAY_RUNS)
        below, above = min(low - middle, 0.0), max(high - middle, 0.0)
        low, high = share * below - (1 - share) * _WIDE_BOUND, share * above + (1 - share) * _WIDE_BOUND
        return Factor(float(sizes.min()), float(sizes.max()), short, long, low, high)

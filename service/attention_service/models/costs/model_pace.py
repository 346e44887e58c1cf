"""The pace of a model: the time of its passes as a multiple of what was predicted."""

from collections import deque
from statistics import median
from typing import Final

_LAST: Final = 15
"""Passes that the pace is learned from."""


class ModelPace:
    """The times of the last passes that were predicted, beside their predictions."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_LAST)

    @property
    def factor(self) -> float:
        """The median of measured / predicted; 1 before the first pass."""
        return median(self._ratios) if self._ratios else 1.0

    def note(self, predicted_ms: float, measured_ms: float) -> None:
        """Learn from a pass. ``predicted_ms``: without the factor."""
        if predicted_ms > 0:
            self._ratios.append(measured_ms / predicted_ms)

"""The pace of a model: predicted times of its runs, corrected by those that ran, as times of modules are."""

from typing import Final

from attention_service.cost import Estimate
from attention_service.runtime.planning.run_ratios import RunRatios

_UNSEEN: Final = 3.0
"""Ratio of the upper bound to the median before any run."""
_RECENT: Final = 12
"""Runs that tell the pace: programs that begin or end beside a model change that of all its runs."""


class ModelPace:
    """Runs of a model by their kind: what they took, beside what the roofline predicted. Times are milliseconds."""

    def __init__(self) -> None:
        self._every = RunRatios(_RECENT)
        self._kinds: dict[str, RunRatios] = {}

    def estimate(self, kind: str, predicted_ms: float) -> Estimate:
        """Return the time of a run of this kind, by runs of the kind, or else of any.

        ``predicted_ms``: without what was learned.
        """
        if predicted_ms <= 0:
            return Estimate(0.0, 0.0, 0.0)
        of_kind = self._kinds.get(kind)
        factor = (None if of_kind is None else of_kind.factor()) or self._every.factor()
        if factor is None:
            return Estimate.within(predicted_ms, _UNSEEN)
        seconds = factor.applied(predicted_ms / 1e3)
        return Estimate(1e3 * seconds.median, 1e3 * seconds.low, 1e3 * seconds.high)

    def ratio(self, kind: str, predicted_ms: float) -> float:
        """Return the estimate as a multiple of what was predicted without it."""
        return self.estimate(kind, predicted_ms).median / predicted_ms if predicted_ms > 0 else 1.0

    def note(self, kind: str, predicted_ms: float, measured_ms: float) -> None:
        """Learn from a run. ``predicted_ms``: as for ``estimate``."""
        for runs in (self._every, self._kinds.setdefault(kind, RunRatios(_RECENT))):
            runs.note(predicted_ms / 1e3, measured_ms / 1e3)


def times_of(estimate: Estimate) -> dict[str, float]:
    """The fields of a reply that tell an estimate in milliseconds."""
    return {
        "predicted_ms": estimate.median, "predicted_low_ms": estimate.low, "predicted_high_ms": estimate.high
    }  # fmt: skip

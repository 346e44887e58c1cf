"""Accuracy: predicted and measured times of past runs, and their differences.

Used from the event loop only, so nothing here needs a lock.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from attention_contract.schemas.costs.accuracy import Computation, MemoryErrors, PredictionErrors, RatioHistogram
from attention_service.cost import Estimate

HISTORY = 1000
"""Runs of one kernel and purpose that are kept."""
RATIO_EDGES = (
    *(0.1, 0.16, 0.25, 0.28, 0.32, 0.36, 0.4, 0.45, 0.5, 0.56, 0.63, 0.71, 0.8, 0.9, 1.0),
    *(1.12, 1.25, 1.4, 1.6, 1.8, 2.0, 2.24, 2.5, 2.8, 3.15, 3.55, 4.0, 6.3, 10.0),
)
"""Bounds of histograms of measured over predicted: preferred numbers, R20 between 1/4 and 4, R5 beyond (ISO 3)."""


@dataclass(slots=True)
class TimedRun:
    """One successful run, of one request or of several at once."""

    kernel: str
    purpose: Computation
    predicted: Estimate
    seconds: float
    estimated_bytes: int
    peak_bytes: int | None = None
    """Measured; None if the device cannot measure it."""
    batch: int = 1
    """Number of requests that ran together."""
    processor: float | None = None
    """Seconds without the time that other load took; None for all of them."""
    model: bool = False
    """True for a request to a whole model, whose name is ``kernel``."""

    @property
    def ratio(self) -> float:
        """Measured over predicted time."""
        return self.seconds / self.predicted.median

    @property
    def covered(self) -> bool:
        """True if the time was within the interval of nine runs in ten."""
        return self.predicted.low <= self.seconds <= self.predicted.high


class Accuracy:
    """The last runs of each kernel and purpose since the clock was set."""

    def __init__(self) -> None:
        self.watchers: list[Callable[[Sequence[TimedRun]], None]] = []
        """Called with all runs, several at a time."""
        self._runs: dict[tuple[str, Computation, bool], deque[TimedRun]] = {}

    def restart(self) -> None:
        """Forget all runs: a new clock predicts."""
        self._runs.clear()

    def record(self, runs: Sequence[TimedRun]) -> None:
        """Keep runs."""
        for run in runs:
            key = run.kernel, run.purpose, run.model
            if key not in self._runs:
                self._runs[key] = deque(maxlen=HISTORY)
            self._runs[key].append(run)
        for watcher in self.watchers:
            watcher(runs)

    def coverage(self) -> Iterator[tuple[str, Computation, float]]:
        """Yield the share of runs within their predicted interval, for each kernel and purpose."""
        for (kernel, purpose, _), runs in self._runs.items():
            yield kernel, purpose, fmean(run.covered for run in runs)

    def report(self) -> list[PredictionErrors]:
        """The errors of each kernel and purpose, in the order of their names."""
        return [_errors(*key, list(runs)) for key, runs in sorted(self._runs.items())]


def _errors(kernel: str, purpose: Computation, model: bool, runs: list[TimedRun]) -> PredictionErrors:
    errors = np.array([run.ratio for run in runs]) - 1
    distances = np.abs(errors)
    return PredictionErrors(
        kernel=kernel,
        purpose=purpose,
        model=model,
        count=len(runs),
        median_error=float(np.median(errors)),
        mean_error=float(errors.mean()),
        median_absolute_error=float(np.median(distances)),
        p95_absolute_error=float(np.quantile(distances, 0.95)),
        coverage=fmean(run.covered for run in runs),
        histogram=_histogram(runs),
        memory=_memory(runs),
    )


def _histogram(runs: list[TimedRun]) -> RatioHistogram:
    counts = [0] * (len(RATIO_EDGES) + 1)
    for run in runs:
        counts[bisect_left(RATIO_EDGES, run.ratio)] += 1
    return RatioHistogram(edges=list(RATIO_EDGES), counts=counts)


def _memory(runs: list[TimedRun]) -> MemoryErrors | None:
    errors = [run.peak_bytes / run.estimated_bytes - 1 for run in runs if run.peak_bytes is not None]
    if not errors:
        return None
    return MemoryErrors(count=len(errors), median_error=float(np.median(errors)), largest_error=max(errors))

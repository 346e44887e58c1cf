"""Drift: detection of a clock that no longer predicts this device's time, so that a calibration is due.

For each kernel and purpose, Page's cumulative sum (Page 1954, Biometrika 41) adds the log-likelihood ratio of each run
between two hypotheses: three fifths of the runs lie outside their 90 % interval (``DRIFTED``), or one fifth does
(``GOOD_ENOUGH``; 10 % are intended). It never falls below 0, and raises the alarm at ``THRESHOLD``. By Lorden's
bound (Lorden 1971, Ann. Math. Stat. 42), a clock as bad as ``GOOD_ENOUGH`` is blamed wrongly once in a million counted
runs at most, in the mean; one that covers nine of ten, once in 10^10.

A run that was slow because other load had the processor counts as inside: its interval holds a time between that of the
processor and the whole.

Runs count only five seconds apart, since runs of one moment share their disturbances, and only if their predicted time
is long enough to measure. So the alarm takes 13 counted runs at least, which is more than a minute of wrong predictions
alone: a burst of slow runs does not raise it.

An error that calibration does not fix (a shape that the curves miss) must not cause one calibration after another. The
pause after one is five minutes at first; each time the same kernel and purpose raise the alarm within their first
hundred counted runs after a calibration, theirs is doubled, up to a day.
"""

import math
from dataclasses import dataclass

from attention_service.runtime.planning.prediction_accuracy import Run

GOOD_ENOUGH = 0.2
DRIFTED = 0.6
"""Share of runs outside their interval under a drifted clock."""
OUTSIDE = math.log(DRIFTED / GOOD_ENOUGH)
INSIDE = math.log((1 - DRIFTED) / (1 - GOOD_ENOUGH))
"""Summand of a run inside its interval."""
THRESHOLD = math.log(1e6)
SPACING_S = 5.0
SHORTEST_S = 2e-4
"""Minimum predicted time of a counted run: shorter runs measure the interpreter, not the device."""
PAUSE_S = 300.0
LONGEST_PAUSE_S = 86_400.0
SOON = 100
"""Counted runs after a calibration within which an alarm means that the calibration did not help."""


@dataclass
class _Sum:
    """Cumulative sum of one kernel and purpose."""

    value: float = 0.0
    counted: float = -math.inf
    """Time of the last counted run."""
    runs: int = 0
    """Counted runs between the setting of the clock and the alarm."""
    pause: float = PAUSE_S


class Drift:
    """Watches runs of a calibrated clock. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], _Sum] = {}
        self._last = -math.inf
        """Time of the last new clock or request for calibration."""

    def restart(self, now: float) -> None:
        """Start again with a new clock."""
        self._last = now
        for each in self._sums.values():
            each.value, each.runs = 0.0, 0

    def see(self, run: Run, now: float) -> bool:
        """Record one run that ended now. Returns True if a calibration should start."""
        if run.predicted.median < SHORTEST_S:
            return False
        found = self._sums.setdefault((run.kernel, run.purpose), _Sum())
        if now - found.counted < SPACING_S:
            return False
        found.counted = now
        found.runs += found.value < THRESHOLD
        found.value = min(max(found.value + (INSIDE if run.covered_but_for_load else OUTSIDE), 0.0), THRESHOLD)
        if found.value < THRESHOLD or now - self._last < found.pause:
            return False
        came_back = self._last > -math.inf and found.runs <= SOON
        found.pause = min(2 * found.pause, LONGEST_PAUSE_S) if came_back else PAUSE_S
        self._last = now
        return True

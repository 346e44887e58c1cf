"""Drift: when the clock no longer tells this device's time, and a calibration is due.

Of each kernel and purpose, Page's cumulative sum (Page 1954, Biometrika 41) adds up how much likelier each run is under
a clock of which three fifths of the runs lie outside their 90 % interval (``DRIFTED``) than under one of which a fifth
do (``GOOD_ENOUGH``; 10 % are meant to). It never falls below 0, and raises the alarm at ``THRESHOLD``. By Lorden's
bound (Lorden 1971, Ann. Math. Stat. 42), a clock as bad as ``GOOD_ENOUGH`` is blamed wrongly once in a million counted
runs at most, in the mean; one that covers nine of ten, once in 10^10.

Runs are counted where they say something: five seconds apart, since those of one moment share its disturbances, and
only if they should take long enough to be measured. So the alarm takes 13 counted runs at least, which is more than a
minute of nothing but wrong predictions: a burst of slow runs does not raise it.

What a calibration does not mend (a shape that the curves do not meet) must not bring about one after the other. The
pause after one is five minutes at first; each time the same kernel and purpose raise the alarm within their first
hundred counted runs after a calibration, theirs is doubled, up to a day.
"""

import math
from dataclasses import dataclass

from attention_service.runtime.planning.accuracy import Run

GOOD_ENOUGH = 0.2
DRIFTED = 0.6
"""Shares of runs outside their interval."""
OUTSIDE = math.log(DRIFTED / GOOD_ENOUGH)
INSIDE = math.log((1 - DRIFTED) / (1 - GOOD_ENOUGH))
"""What one run adds to the sum."""
THRESHOLD = math.log(1e6)
SPACING_S = 5.0
SHORTEST_S = 2e-4
"""Runs that should take less are over before the interpreter is: they measure the moment, not the device."""
PAUSE_S = 300.0
LONGEST_PAUSE_S = 86_400.0
SOON = 100
"""Counted runs after a calibration, in which an alarm says that it did not mend what is wrong."""


@dataclass
class _Sum:
    """Of one kernel and purpose."""

    value: float = 0.0
    counted: float = -math.inf
    """When a run was last counted."""
    runs: int = 0
    """How many were, since the clock was set, until the alarm was raised."""
    pause: float = PAUSE_S


class Drift:
    """Watches runs of a calibrated clock. Times are seconds of a clock that never goes back."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], _Sum] = {}
        self._last = -math.inf
        """When the clock was set, or a calibration asked for."""

    def restart(self, now: float) -> None:
        """Begin anew: the clock was set just now."""
        self._last = now
        for each in self._sums.values():
            each.value, each.runs = 0.0, 0

    def see(self, run: Run, now: float) -> bool:
        """Look at one run that ended now. Returns whether a calibration should start."""
        if run.predicted.median < SHORTEST_S:
            return False
        found = self._sums.setdefault((run.kernel, run.purpose), _Sum())
        if now - found.counted < SPACING_S:
            return False
        found.counted = now
        found.runs += found.value < THRESHOLD
        found.value = min(max(found.value + (INSIDE if run.covered else OUTSIDE), 0.0), THRESHOLD)
        if found.value < THRESHOLD or now - self._last < found.pause:
            return False
        came_back = self._last > -math.inf and found.runs <= SOON
        found.pause = min(2 * found.pause, LONGEST_PAUSE_S) if came_back else PAUSE_S
        self._last = now
        return True

"""Cores that other programs leave to this process, by the times that Linux counts for each core.

A thread that waits for one whose core another program has does nothing. A computation that shares the cores therefore
takes less time with fewer threads.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

_SPACING_S: Final = 0.2
"""Seconds between two looks. The system counts in hundredths of a second."""
_FEWER, _MORE = 0.6, 0.3
"""Shares of a core that may be missing for one thread more: if it runs already, and to begin it."""
_GLANCES, _GLANCE_S = 3, 1e-4
"""Glances at the programs that run now, and seconds between: who sent a request may not be asleep yet."""
_STAT: Final = Path("/proc/stat")
_LOAD: Final = Path("/proc/loadavg")


class CoreTimes(NamedTuple):
    """Seconds since some time."""

    now: float
    busy: float
    """Time that any program ran on the cores that this process may use."""
    own: float
    """Time that this process ran."""
    cores: int
    """The number of those cores."""


def core_times(stat: Path = _STAT) -> CoreTimes | None:
    """Read the times; None if the system does not tell them."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    try:
        lines = stat.read_text("ascii").splitlines()
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        rows = [line.split() for line in lines if line.partition(" ")[0] in cores]
        ticks = sum(int(count) for row in rows for at, count in enumerate(row[1:9]) if at not in (3, 4))  # idle, iowait
        return CoreTimes(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time(), len(rows))
    except (OSError, ValueError):
        return None


def running_now(load: Path = _LOAD) -> int | None:
    """The threads of any program that run or wait for a core now; None if the system does not tell them."""
    try:
        return int(load.read_text("ascii").split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return None


class FreeCores:
    """The number of threads that a computation is to have, beside other programs.

    It falls by the time that others took since the last look, and rises as soon as they run no more.
    """

    def __init__(
        self,
        most: int,
        look: Callable[[], CoreTimes | None] = core_times,
        glance: Callable[[], int | None] = running_now,
    ) -> None:
        """``most``: the threads that it has on a quiet machine."""
        self.threads = most
        self._most, self._look, self._glance = most, look, glance
        self._last = look() if most > 1 else None

    def fit(self) -> int:
        """Return the number of threads for what comes next."""
        if self._last is None:
            return self.threads
        if time.monotonic() - self._last.now >= _SPACING_S and (found := self._look()) is not None:
            self.threads, self._last = self._threads_of(self._last, found), found
        if self.threads < self._most:
            self._rise(self._last.cores)
        return self.threads

    def _threads_of(self, last: CoreTimes, found: CoreTimes) -> int:
        others = (found.busy - last.busy) - (found.own - last.own)
        free = found.cores - max(0.0, others / (found.now - last.now))
        fewer, more = int(max(1.0, free + _FEWER)), int(max(1.0, free + _MORE))
        return min(self._most, max(more, min(self.threads, fewer)))

    def _rise(self, cores: int) -> None:
        for glance in range(_GLANCES):
            if glance:
                time.sleep(_GLANCE_S)
            if (running := self._glance()) is None:
                return
            if (free := min(self._most, cores - running + 1)) > self.threads:  # one of them is this thread
                self.threads, self._last = free, self._look() or self._last
                if free == self._most:
                    return

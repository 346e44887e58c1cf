"""Threads that spin while they wait for each other, and sleep at once while other programs use their cores.

The threads of GNU's OpenMP spin for ``GOMP_SPINCOUNT`` turns before they sleep, but for hardly any while their process
has more of them than cores. A further team of threads, which does nothing, therefore puts all of them to sleep.
"""

import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import psutil
import torch

_SPACING_S: Final = 0.1
"""Seconds between two looks. The system counts in hundredths of a second."""
_SLEEPS, _SPINS = 0.6, 0.3
"""Shares of a core that may be missing for the threads to go on spinning, and to begin."""
_GRAIN: Final = 2**15
"""Numbers of a tensor that PyTorch gives a thread of its own."""
_STAT: Final = Path("/proc/stat")
_LOAD: Final = Path("/proc/loadavg")


class CoreTimes(NamedTuple):
    """Seconds since some time."""

    now: float
    busy: float
    """Time that any program ran on the cores that this process may use."""
    own: float
    """Time that this process and its parent ran. The parent of a model's process is its server."""
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
        parent = psutil.Process(os.getppid()).cpu_times()
        own = time.process_time() + parent.user + parent.system
        return CoreTimes(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own, len(rows))
    except (OSError, ValueError, psutil.Error):
        return None


def running_now(load: Path = _LOAD) -> float:
    """The threads of all programs that run or wait for a core now; infinite if the system does not tell them."""
    try:
        return int(load.read_text("ascii").split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return math.inf


class SharedCores:
    """The way in which the threads of this process wait for each other: by what other programs did since a look."""

    def __init__(
        self, threads: int, look: Callable[[], CoreTimes | None] = core_times,
        running: Callable[[], float] = running_now,
    ) -> None:  # fmt: skip
        """``threads``: those of a computation."""
        self._threads, self._look, self._running = threads, look, running
        self._last = look() if threads > 1 else None
        self._teams = _IdleTeams(threads)

    @property
    def asleep(self) -> bool:
        """True while threads that wait sleep at once."""
        return self._teams.kept

    def look(self) -> None:
        """Choose the way for what comes next."""
        last = self._last
        if last is not None and self.asleep and self._running() <= 1 + last.cores - self._threads:
            self._teams.end()  # who used the cores has ended: one of those that run is this thread
            self._last = self._look()
            return
        if last is None or time.monotonic() - last.now < _SPACING_S or (usage := self._look()) is None:
            return
        self._last = usage
        others = ((usage.busy - last.busy) - (usage.own - last.own)) / (usage.now - last.now)
        missing = self._threads - (usage.cores - max(0.0, others))
        if missing > _SLEEPS:
            self._teams.keep(usage.cores)
        elif missing <= _SPINS:
            self._teams.end()


class _IdleTeams:
    """Teams of threads that do nothing, so that this process has more threads than cores."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._ends = threading.Event()
        self.kept = False

    def keep(self, cores: int) -> None:
        """Have as many teams as it takes."""
        if self.kept:
            return
        self.kept, self._ends = True, threading.Event()
        for _ in range(max(1, (cores - self._threads) // (self._threads - 1) + 1)):
            threading.Thread(target=self._stay, args=(self._ends,), name="attention-idle", daemon=True).start()

    def end(self) -> None:
        """Let the teams end."""
        self._ends.set()
        self.kept = False

    def _stay(self, ends: threading.Event) -> None:
        torch.ones(self._threads * _GRAIN).exp_()  # OpenMP starts a team for each thread that computes
        ends.wait()

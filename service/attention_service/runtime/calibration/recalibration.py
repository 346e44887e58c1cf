"""Recalibration: the device is measured again, one measurement at a time."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from itertools import accumulate, chain, repeat

from attention_service.runtime.calibration.calibrating import TooBusyError

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 3600.0


def growing_pauses() -> Iterable[float]:
    """Yield pauses in seconds between attempts on a busy machine: each twice the last, endlessly."""
    return accumulate(chain([FIRST_PAUSE_S], repeat(2)), lambda pause, factor: min(factor * pause, LONGEST_PAUSE_S))


class Recalibration:
    """Runs the measurement of the device that sets its clock. Used from the event loop only."""

    def __init__(self, pauses: Callable[[], Iterable[float]] = growing_pauses) -> None:
        self.work: Callable[[], Awaitable[None]] | None = None
        """Measures the device and sets its clock; None if calibration is off."""
        self.done = 0
        self.failed = 0
        self._pauses = pauses
        self._task: asyncio.Task[None] | None = None
        self._pausing = False

    @property
    def running(self) -> bool:
        """True while the device, or another server's measurement of it, is in progress."""
        return self.planned and not self._pausing

    @property
    def planned(self) -> bool:
        """True while it is in progress, or pending after a pause."""
        return self._task is not None and not self._task.done()

    def start(self) -> bool:
        """Measure in the background, unless a measurement is in progress. Returns True if it started."""
        if self.work is None or self.planned:
            return False
        self._task = asyncio.create_task(self._run(self.work))
        return True

    async def stop(self) -> None:
        """Cancel a running measurement."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat until the device is measured, or a failure occurs that another attempt will not fix."""
        for pause in self._pauses():
            try:
                await work()
            except TooBusyError as fault:
                self.failed += 1
                log.warning("%s; tried again in %.0f s", fault, pause)
            except Exception:  # predictions go on with the clock that there is
                self.failed += 1
                log.exception("the device could not be measured")
                return
            else:
                self.done += 1
                return
            self._pausing = True
            await asyncio.sleep(pause)
            self._pausing = False

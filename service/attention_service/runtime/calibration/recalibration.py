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
    """Seconds between one attempt that found the machine too busy and the next: twice as many each time, endlessly."""
    return accumulate(chain([FIRST_PAUSE_S], repeat(2)), lambda pause, factor: min(factor * pause, LONGEST_PAUSE_S))


class Recalibration:
    """Runs what measures the device and sets its clock. Used from the event loop only."""

    def __init__(self, pauses: Callable[[], Iterable[float]] = growing_pauses) -> None:
        self.work: Callable[[], Awaitable[None]] | None = None
        """Measures the device and sets its clock; None where nobody does."""
        self.done = 0
        self.failed = 0
        self._pauses = pauses
        self._task: asyncio.Task[None] | None = None
        self._pausing = False

    @property
    def running(self) -> bool:
        """Whether the device is being measured now, or another server's measurement waited for."""
        return self.planned and not self._pausing

    @property
    def planned(self) -> bool:
        """Whether it is being measured, or will be again after a pause."""
        return self._task is not None and not self._task.done()

    def start(self) -> bool:
        """Measure in the background, unless that is being done. Returns whether it started."""
        if self.work is None or self.planned:
            return False
        self._task = asyncio.create_task(self._run(self.work))
        return True

    async def stop(self) -> None:
        """Give up a measurement that is running."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Until the device is measured, or something fails that another attempt will not mend."""
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

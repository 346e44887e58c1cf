"""Recalibration: the device is measured again, one measurement at a time."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


class Recalibration:
    """Runs what measures the device and sets its clock. Used from the event loop only."""

    def __init__(self) -> None:
        self.work: Callable[[], Awaitable[None]] | None = None
        """Measures the device and sets its clock; None where nobody does."""
        self.done = 0
        self.failed = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether the device is being measured now."""
        return self._task is not None and not self._task.done()

    def start(self) -> bool:
        """Measure in the background, unless that is being done. Returns whether it started."""
        if self.work is None or self.running:
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
        try:
            await work()
        except Exception:  # predictions go on with the clock that there is
            self.failed += 1
            log.exception("the device could not be measured")
        else:
            self.done += 1

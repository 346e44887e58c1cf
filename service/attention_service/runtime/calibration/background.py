"""A calibration beside requests: one measurement at a time, while nobody waits for the device."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, TypeVar

from attention_service.runtime.calibration.calibrating import Calibration
from attention_service.runtime.device import Device
from attention_service.runtime.scheduling.budget import Budget

ResultT = TypeVar("ResultT")

_PAUSE_S, _PATIENCE_S = 0.02, 5.0
"""How long to wait before looking again whether the device is free, and after how long to measure all the same."""
_SHARE_OF_BUDGET = 4


class Run(Protocol):
    """Runs something on the device's thread."""

    def __call__(self, work: Callable[[], ResultT]) -> Awaitable[ResultT]:
        """Its result."""


async def measured(device: Device, budget: Budget, run: Run) -> Calibration:
    """A calibration whose requests have all been run; its clock is still to be fitted.

    What it needs is admitted like anything else, and it stands in the way of a request for as long as one measurement
    takes: a fraction of a second. Where others run without a pause, it measures every few seconds; while any wait, not.
    """
    calibration = await run(partial(Calibration, device, budget.room // _SHARE_OF_BUDGET, seed=time.time_ns()))
    need = 2 * calibration.room  # a request's tensors, and what it needs at its peak
    more = True
    while more:
        await _quiet(budget)
        if budget.waiting or need > budget.free:  # others come first, however long
            await asyncio.sleep(_PATIENCE_S)
            continue
        await budget.acquire(need)
        try:
            more = await run(calibration.step)
        finally:
            budget.release(need)
    return calibration


async def _quiet(budget: Budget) -> None:
    """Wait until nothing runs and nothing waits, but not for ever."""
    since = time.monotonic()
    while (budget.in_flight or budget.waiting) and time.monotonic() - since < _PATIENCE_S:
        await asyncio.sleep(_PAUSE_S)

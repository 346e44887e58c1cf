"""Calibration beside requests: one measurement at a time, while the device is idle."""

import asyncio
import time
from functools import partial

from attention_service.runtime.calibration.calibrating import Calibration
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.scheduling.budget import Budget
from attention_service.runtime.scheduling.execution import Run

_PAUSE_S, _PATIENCE_S = 0.02, 5.0
"""Seconds between two checks for an idle device, and seconds after which a measurement runs anyway."""
_SHARE_OF_BUDGET = 4


async def measured(device: Device, budget: Budget, run: Run) -> Calibration:
    """Return a calibration with all measurements; its clock is not fitted yet.

    Its memory is admitted like a request's, and it delays a request by one measurement at most: a fraction of a second.
    If others run without a pause, it measures every few seconds; while any wait, it does not.
    """
    calibration = await run(partial(Calibration, device, budget.capacity // _SHARE_OF_BUDGET, seed=time.time_ns()))
    need = 2 * calibration.room  # a request's tensors, and what it needs at its peak
    more = True
    while more:
        await _quiet(budget)
        if budget.waiting or need > budget.available:  # others come first, however long
            await asyncio.sleep(_PATIENCE_S)
            continue
        await budget.acquire(need)
        try:
            more = await run(calibration.step)
        finally:
            budget.release(need)
    return calibration


async def _quiet(budget: Budget) -> None:
    """Wait until nothing runs and nothing waits, with a time limit."""
    since = time.monotonic()
    while (budget.in_flight or budget.waiting) and time.monotonic() - since < _PATIENCE_S:
        await asyncio.sleep(_PAUSE_S)

"""A calibration from beginning to end: all at once, or one measurement at a time while the server is idle."""

import time

from attention_service.cost import Calibrated, Rates
from attention_service.cost.typical_rates import typical
from attention_service.runtime.calibration.fitting import Point, fit
from attention_service.runtime.calibration.measuring import Bench
from attention_service.runtime.calibration.plausibility import implausible_growth
from attention_service.runtime.device.torch_device import Device, measure_rates

SECONDS = 60.0
"""Maximum duration of a calibration."""
FITTING_S = 13.0
"""Share of it for fitting the curves; a quarter of a shorter calibration."""
MOST_BYTES = 2**30
"""Maximum bytes of one measured request."""
MOST_POINTS = 3000
FEWEST_POINTS = 200


class TooBusyError(Exception):
    """Too few undisturbed measurements, or an implausible result."""


class Calibration:
    """Measurement of a device, one request at a time. Used from the device's thread only."""

    def __init__(self, device: Device, room: int, *, seed: int = 0, seconds: float = SECONDS) -> None:
        """``room``: the bytes that one request may need; ``seconds``: the duration of the calibration."""
        self.room = min(room, MOST_BYTES)
        self._left = seconds - min(FITTING_S, seconds / 4)
        self._rates: Rates = measure_rates(device.torch)
        self._bench = Bench(device, self._rates, self.room, seed)
        self._points: list[Point] = []
        self._kind = device.torch.type

    @property
    def points(self) -> int:
        """Number of requests measured so far."""
        return len(self._points)

    def step(self) -> bool:
        """Measure one request. Returns True if there is time for another."""
        started = time.monotonic()
        if (point := self._bench.next()) is not None:
            self._points.append(point)
        self._left -= time.monotonic() - started
        return self._left > 0 and self.points < MOST_POINTS

    def clock(self) -> Calibrated:
        """Fit and return the clock. Raises TooBusyError."""
        if self.points < FEWEST_POINTS:
            raise TooBusyError(
                f"only {self.points} requests could be measured undisturbed, where {FEWEST_POINTS} are needed; "
                "calibrate while the machine has nothing else to do"
            )
        clock = fit(self._points, self._rates, typical(self._kind))
        if (fault := implausible_growth(clock)) is not None:
            raise TooBusyError(
                f"the measurements are thrown away, since {fault}; calibrate while the machine has nothing else to do"
            )
        return clock

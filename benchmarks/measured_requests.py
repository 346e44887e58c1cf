"""Measured times of random requests."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import cycle

import numpy as np

from attention_contract.errors import AttentionError
from attention_contract.schemas.analyses.hopfield import HopfieldRequest
from attention_contract.schemas.attention import ForwardRequest
from attention_contract.schemas.costs.accuracy import Basis, Computation
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.schemas.weights import WeightsRequest
from attention_service.core.methods import approximation_of
from attention_service.cost import Clock, Estimate, Rates, Roofline, Traffic, executed_flops, rank_seconds
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import forward, gradients, hopfield
from attention_service.runtime.operations import weights as inspection
from attention_service.runtime.scheduling.jobs import Job
from benchmarks.load_probe import Probe
from benchmarks.random_requests import Drawn, Kind, draw, kinds
from benchmarks.random_specs import approximations

RUNS, ENOUGH_S = 3, 0.003
"""Maximum runs of a request, and seconds after which fewer suffice: more requests tell more than more runs of one."""
WARM_S = 0.1
"""A longer request runs once, since a cold start adds little to it. Code for a new shape, such as oneDNN's for half
types, takes some 20 ms."""
RANGES_S = ((0.0, 0.01), (0.01, 0.05), (0.05, 0.2))
SHARES = (0.92, 0.065, 0.015)
"""Shares of requests per range of times predicted from the device's rates. Many short requests tell more than a few
long ones, but large tensors have costs of their own."""
USUAL = 0.15
"""Share of common requests. It makes predictions of common requests a third better and all others hardly worse; a
larger share adds little."""
_TRIES = 60
_BACKWARD = 3.5
"""FLOPs of both passes beside those of the forward pass."""


@dataclass(frozen=True)
class Measured:
    """One request that ran."""

    computation: Computation
    kernel: str
    dtype: str
    seconds: tuple[float, ...]
    predicted: Callable[[Clock], Estimate]
    """Predicts it by a clock."""

    @property
    def median(self) -> float:
        """Median of its runs."""
        return float(np.median(self.seconds))


@dataclass
class _Recorder:
    """A clock that can make its last prediction again by another clock."""

    rates: Rates
    basis: Basis = "rates"
    again: Callable[[Clock], Estimate] = field(init=False)

    def predict(self, counts: Traffic, itemsize: int, kind: str) -> Estimate:
        """Predict from the rates, and keep what was asked."""
        self.again = lambda clock: clock.predict(counts, itemsize, kind)
        return self.again(Roofline(self.rates))

    def rated(self, seconds: Callable[[Rates], float]) -> Estimate:
        """Predict from the rates."""
        return Roofline(self.rates).rated(seconds)


class Bench:
    """Draws requests of every kind in turn, and measures them one at a time. Used from the device's thread only."""

    def __init__(
        self,
        device: Device,
        rates: Rates,
        most_bytes: int,
        seed: int,
        *,
        enough_s: float = ENOUGH_S,
    ) -> None:
        """``most_bytes``: of one request; ``enough_s``: seconds after which a request is not run again."""
        self._enough_s = enough_s
        self._rates = rates
        self._recorder = _Recorder(rates)
        self._device = replace(device, clock=self._recorder)
        self._most_bytes = most_bytes
        self._rng = np.random.default_rng(seed)
        # Forward passes of exact attention count twice: they are most common, and determine the choice of kernels.
        often = [kind for kind in kinds() if kind.purpose == "forward" and kind.kernel not in approximations()]
        self._kinds = cycle([*kinds(), *often])
        self._probe = Probe(device)

    def next_request(self) -> Measured | None:
        """Measure one request; None if the machine was disturbed, or no request of the next kind came about."""
        kind = next(self._kinds)
        drawn = self._draw(kind)
        if drawn is None:
            return None
        job, predicted = drawn
        seconds, probes = self._timed(job.run)
        if self._probe.disturbed(*probes):
            return None
        return Measured(kind.purpose, kind.kernel, job.prepared.dtype, tuple(seconds), predicted)

    def _timed(self, run: Callable[[], object]) -> tuple[list[float], list[float]]:
        """Return the seconds of each run that counts, and of the probe before and after them."""
        probes, seconds = [self._probe.seconds()], [_once(run)]
        if seconds[0] <= WARM_S:
            seconds.clear()
        while not seconds or (len(seconds) < RUNS and sum(seconds) < self._enough_s):
            self._probe.fill_caches()
            seconds.append(_once(run))
        return seconds, [*probes, self._probe.seconds()]

    def _draw(self, kind: Kind) -> tuple[Job, Callable[[Clock], Estimate]] | None:
        usual = bool(self._rng.random() < USUAL)
        low, high = RANGES_S[int(self._rng.choice(len(SHARES), p=SHARES))]
        for _ in range(_TRIES):
            drawn = draw(self._rng, kind, lambda bound: low <= self._seconds(bound, kind) <= high, usual=usual)
            if drawn is None:
                continue
            if (job := self.prepared(drawn)) is not None and job.plan.predicted.median <= max(high, RANGES_S[-1][1]):
                return job, self._recorder.again
        return None

    def _seconds(self, bound: BoundRequest, kind: Kind) -> float:
        """About how long it takes, found without a rehearsal."""
        backward = kind.purpose == "gradients"
        if approximation_of(bound.spec) is None:
            return rank_seconds(bound, kind.kernel, self._rates, backward=backward)
        return executed_flops(bound, kind.kernel) * (_BACKWARD if backward else 1) / self._rates.flops_per_s

    def prepared(self, drawn: Drawn) -> Job | None:
        """Return the job of a request; None if it is invalid or needs too much memory."""
        try:
            job = self._planned(drawn)
        except AttentionError:  # parts that do not go together, or that this kernel does not have
            return None
        return job if job.plan.kernel == drawn.kind.kernel and job.plan.peak_bytes <= self._most_bytes else None

    def _planned(self, drawn: Drawn) -> Job:
        device, most_bytes = (
            self._device.exact(),
            self._most_bytes,
        )  # nothing is cached, so the recorder hears of each request
        module = None if drawn.module is None else drawn.module.on(device.torch)
        match drawn.request:
            case GradientsRequest() as request:
                return gradients.prepare(module, request, device, most_bytes)
            case WeightsRequest() as request:
                return inspection.prepare(module, request, device, most_bytes)
            case ForwardRequest() as request:
                return forward.prepare(module, request, device, most_bytes)
            case HopfieldRequest() as request:
                return hopfield.prepare(request, device)
            case _:
                raise TypeError(f"{type(drawn.request).__name__} is no request that runs on a device")


def _once(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started

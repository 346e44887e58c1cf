"""Measured times of random requests."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Literal

import numpy as np
import torch

from attention_contract.errors import AttentionError
from attention_contract.schemas.accuracy import Computation
from attention_contract.schemas.attention import ForwardRequest
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.schemas.hopfield import HopfieldRequest
from attention_contract.schemas.weights import WeightsRequest
from attention_contract.tensors import Encoding
from attention_contract.wire import JSON, SAFETENSORS, from_body, to_body
from attention_service.cost import Clock, Estimate, Rates, Roofline, Term, Workload
from attention_service.cost.terms import FORMS, Form, reading_terms, transfer_terms, writing_terms
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import forward, gradients, hopfield
from attention_service.runtime.operations import weights as inspection
from attention_service.runtime.scheduling.jobs import Job
from benchmarks.curve_fitting import Point
from benchmarks.load_probe import Probe
from benchmarks.prediction_recorder import Prediction, PredictionRecorder
from benchmarks.random_requests import Drawn, Kind, draw, kinds
from benchmarks.random_specs import approximations, between

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
_BODIES = 10
"""A body is measured once in this many measurements."""
MOST_NUMBERS = 2**19
Measurable = tuple[str, Sequence[Term], Callable[[], object]]
"""Kind, terms and one execution of a measurement."""


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


class Bench:
    """Draws requests of every kind in turn, and measures them one at a time. Used from the device's thread only."""

    def __init__(
        self,
        device: Device,
        rates: Rates,
        room: int,
        seed: int,
        *,
        enough_s: float = ENOUGH_S,
    ) -> None:
        """``room``: maximum bytes of one request; ``enough_s``: seconds after which a request is not run again."""
        self._enough_s = enough_s
        self._roofline = Roofline(rates)
        self._recorder = PredictionRecorder(rates)
        self._device = replace(device, clock=self._recorder)
        self._room = room
        self._rng = np.random.default_rng(seed)
        # Forward passes of exact attention count twice: they are most common, and determine the choice of kernels.
        often = [kind for kind in kinds() if kind.purpose == "forward" and kind.kernel not in approximations()]
        self._kinds = cycle([*kinds(), *often])
        self._carried = cycle(_carried(device))
        self._turn = 0
        self._probe = Probe(device)

    def next(self) -> Point | None:
        """Measure one request, or occasionally one body; None if the machine was disturbed."""
        self._turn += 1
        measured = self._body() if self._turn % _BODIES == 0 else self._request()
        if measured is None:
            return None
        kind, terms, run = measured
        seconds, probes = self._timed(run)
        if self._probe.disturbed(*probes):
            return None
        return Point(kind, tuple(terms), tuple(seconds))

    def next_request(self) -> Measured | None:
        """Measure one request; None if the machine was disturbed, or no request of the next kind came about."""
        kind = next(self._kinds)
        drawn = self._draw(kind)
        if drawn is None:
            return None
        job, prediction = drawn
        seconds, probes = self._timed(job.run)
        if self._probe.disturbed(*probes):
            return None
        return Measured(kind.purpose, kind.kernel, job.prepared.dtype, tuple(seconds), prediction.again)

    def _timed(self, run: Callable[[], object]) -> tuple[list[float], list[float]]:
        """Return the seconds of each run that counts, and of the probe before and after them."""
        probes, seconds = [self._probe.seconds()], [_once(run)]
        if seconds[0] <= WARM_S:
            seconds.clear()
        while not seconds or (len(seconds) < RUNS and sum(seconds) < self._enough_s):
            self._probe.fill_caches()
            seconds.append(_once(run))
        return seconds, [*probes, self._probe.seconds()]

    def _request(self) -> Measurable | None:
        kind = next(self._kinds)
        drawn = self._draw(kind)
        return None if drawn is None else (kind.name, drawn[1].terms, drawn[0].run)

    def _body(self) -> Measurable:
        """Return a body to read or to write, or bytes to transfer to the device."""
        what, form = next(self._carried)
        numbers, dtype = between(self._rng, 16, MOST_NUMBERS), str(self._rng.choice(["float32", "float64"]))
        tensor = np.resize(self._rng.standard_normal(min(numbers, 2**16)), (1, 1, numbers)).astype(dtype)
        if what == "transfer":
            host, target = torch.from_numpy(tensor), self._device.torch
            return "transfer", transfer_terms(tensor.nbytes), lambda: host.to(target).cpu()
        request = ForwardRequest(query=tensor)
        media_type = SAFETENSORS if form == "safetensors" else JSON
        encoding: Encoding = "base64" if form == "base64" else "list"
        if what == "write":
            terms = writing_terms(form, numbers, tensor.itemsize)
            return f"write {form}", terms, lambda: to_body(request, media_type, "request", encoding)
        body = b"".join(to_body(request, media_type, "request", encoding))
        terms = reading_terms(form, numbers, tensor.itemsize)
        return f"read {form}", terms, lambda: from_body(ForwardRequest, body, media_type, "request")

    def _draw(self, kind: Kind) -> tuple[Job, Prediction] | None:
        usual = bool(self._rng.random() < USUAL)
        low, high = RANGES_S[int(self._rng.choice(len(SHARES), p=SHARES))]
        for _ in range(_TRIES):
            drawn = draw(self._rng, kind, lambda work: low <= self._seconds(work, kind) <= high, usual=usual)
            if drawn is None:
                continue
            if (job := self.prepared(drawn)) is not None and job.plan.predicted.median <= max(high, RANGES_S[-1][1]):
                return job, self._recorder.made[0]
        return None

    def _seconds(self, work: Workload, kind: Kind) -> float:
        clock = self._roofline
        predict = clock.gradients if kind.purpose == "gradients" else clock.forward
        return predict(work, kind.kernel).median

    def prepared(self, drawn: Drawn) -> Job | None:
        """Return the job of a request; None if it is invalid or needs too much memory."""
        try:
            job = self._planned(drawn)
        except AttentionError:  # parts that do not go together, or that this kernel does not have
            return None
        return job if job.plan.kernel == drawn.kind.kernel and job.plan.peak_bytes <= self._room else None

    def _planned(self, drawn: Drawn) -> Job:
        device, room = self._device.exact(), self._room  # nothing is cached, so the recorder hears of each request
        module = None if drawn.module is None else drawn.module.on(device.torch)
        match drawn.request:
            case GradientsRequest() as request:
                return gradients.prepare(module, request, device, room)
            case WeightsRequest() as request:
                return inspection.prepare(module, request, device, room)
            case ForwardRequest() as request:
                return forward.prepare(module, request, device, room)
            case HopfieldRequest() as request:
                return hopfield.prepare(request, device)
            case _:
                raise TypeError(f"{type(drawn.request).__name__} is no request that runs on a device")


def _once(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _carried(device: Device) -> list[tuple[Literal["read", "write", "transfer"], Form]]:
    both: tuple[Literal["read", "write"], ...] = ("read", "write")
    bodies = [(what, form) for what in both for form in FORMS]
    return [*bodies, ("transfer", "safetensors")] if device.is_cuda else [*bodies]

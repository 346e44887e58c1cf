"""Measured crossovers: the size from which one alternative is faster, by runs near the predicted size."""

import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attention_contract.schemas.attention import ForwardRequest, RawForwardRequest
from attention_contract.schemas.costs.complexity import ComplexityReply, ComplexityRequest
from attention_contract.tensors import DTYPES, Array
from attention_service.core.methods import approximation_of
from attention_service.core.multihead import parameter_shapes
from attention_service.core.tensors import to_torch
from attention_service.cost.tensor_bytes import input_bytes
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import forward
from attention_service.runtime.operations.complexity.crossovers import TOKENS
from attention_service.runtime.operations.complexity.subjects import DeviceMemory, RequestedSubjects, Subject
from attention_service.runtime.scheduling.budget import Budget
from attention_service.runtime.scheduling.executor import DeviceCall
from attention_service.runtime.scheduling.jobs import Job

Numbers = NDArray[np.float64]
_DRAWN_TENSORS = frozenset({"query", "key", "value", "past_key", "past_value"})
_POOL = 2**16
"""Numbers that are drawn; they repeat in larger tensors."""

WITHIN = 1.6, 1.2
"""Factors around the size that bound the search: first of the predicted size, then of the found one."""
_BEYOND = 1.3
"""Factor by which the line through the ratios is extrapolated beyond the measured sizes."""
_FARTHEST = WITHIN[0] * _BEYOND * WITHIN[1]
_UNSURE = 0.05
"""Maximum standard error of the logarithm of the reported size."""
_LEVEL = 1e-6
_SIZES = 7
_MIN_ROUNDS, _MAX_ROUNDS, _ENOUGH_S = 5, 25, 0.03
"""Minimum and maximum rounds per size, and the seconds after which fewer suffice."""
_LONGEST_S = 30.0
"""Time limit of one request: pairs whose predicted time exceeds the rest of it are not measured."""


async def tried(
    reply: ComplexityReply,
    module: Module | None,
    request: ComplexityRequest,
    place: DeviceMemory,
    run: DeviceCall,
    budget: Budget,
) -> ComplexityReply:
    """Return the reply with ``measured`` in its crossovers, if both can run on the server's own device.

    Each round of runs takes its turn among the requests, and its memory is admitted like theirs. Raises Overloaded.
    """
    requested = RequestedSubjects(module, request, place)
    here = {
        subject.label: subject
        for subject in (requested.subject, *requested.alternatives())
        if subject.place.device is place.device
    }
    filler, left, reported = await run(partial(CacheFiller, place.device)), _LONGEST_S, []
    for crossover in reply.crossovers:
        where = None
        if (
            crossover.of == "time"
            and crossover.at
            and crossover.dimension in TOKENS
            and here.keys() >= set(crossover.between)
        ):
            trial = _CrossoverTrial(here[crossover.between[0]], here[crossover.between[1]], crossover.dimension)
            largest = min(crossover.searched[1], round(crossover.at * _FARTHEST))
            seconds = await run(partial(trial.predicted_s, crossover.at))
            if seconds <= left and await run(partial(trial.need, largest)) <= budget.capacity:
                left -= seconds
                ratio = partial(trial.ratio, filler=filler, run=run, budget=budget)
                where = await crossing(ratio, crossover.at, crossover.searched)
        reported.append(crossover if where is None else crossover.model_copy(update={"measured": where}))
    return reply.model_copy(update={"crossovers": reported})


async def crossing(ratio: Callable[[int], Awaitable[float]], near: float, searched: tuple[int, int]) -> int | None:
    """Find where a ratio of times passes 1: the zero of the line through logarithms of ratios at sizes near it.

    None if it does not pass near there, or so flatly that the size is uncertain.
    """
    unsure = 0.0
    for factor in WITHIN:
        low, high = max(searched[0], near / factor), min(searched[1], near * factor)
        sizes = np.unique(np.round(np.geomspace(low, high, _SIZES))).astype(int)
        place, unsure = _root(np.log(sizes), np.log([await ratio(int(size)) for size in sizes]))
        if not np.log(low / _BEYOND) <= place <= np.log(high * _BEYOND):
            return None
        near = float(np.exp(place))
    return None if unsure > _UNSURE else round(near)


def _root(x: Numbers, y: Numbers) -> tuple[float, float]:
    """Return the zero of the line through points and its standard error; infinite for a level line."""
    middle, level = x.mean(), y.mean()
    wide = np.square(x - middle).sum()
    slope = (x - middle) @ y / wide if wide else 0.0
    if abs(slope) <= _LEVEL:
        return np.inf, np.inf
    place = middle - level / slope
    off = np.square(y - level - slope * (x - middle)).sum() / max(len(x) - 2, 1)
    return float(place), float(np.sqrt(off * (1 / len(x) + (place - middle) ** 2 / wide)) / abs(slope))


class CacheFiller:
    """Other data for the caches, as the work between two requests leaves it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._numbers = torch.rand(2**20, device=device.torch)
        self._exponentials = torch.empty_like(self._numbers)

    def fill(self) -> None:
        """Read and write a few megabytes."""
        torch.exp(self._numbers, out=self._exponentials)
        self._device.synchronize()


def rounds(jobs: Sequence[Job], filler: CacheFiller) -> list[float]:
    """Return the seconds of each job, run alternately; before each run the caches are filled with other data."""
    seconds = []
    for job in jobs:
        filler.fill()
        started = time.perf_counter()
        job.run()
        seconds.append(time.perf_counter() - started)
    return seconds


@dataclass(frozen=True)
class _CrossoverTrial:
    """Two subjects to run at sizes of one dimension."""

    one: Subject
    other: Subject
    dimension: str

    def predicted_s(self, size: int) -> float:
        """Predict the seconds of the search for a crossover around this size."""
        once = 0.0
        for subject in (self.one, self.other):
            bound = subject.at(self.dimension, size)
            kernel = subject.kernel_of(bound)
            once += subject.time(subject.forward(bound, kernel), bound, kernel).median
        return len(WITHIN) * _SIZES * max(once * _MIN_ROUNDS, min(once * _MAX_ROUNDS, _ENOUGH_S))

    def need(self, size: int) -> int:
        """Bytes of both: their tensors and their peaks."""
        bytes_of_both = 0
        for subject in (self.one, self.other):
            bound = subject.at(self.dimension, size)
            held = 0 if bound.module is None else bound.module.bytes
            peak = subject.forward(bound, subject.kernel_of(bound), subject.taps).peak_bytes
            bytes_of_both += held + input_bytes(bound) + peak
        return bytes_of_both

    async def ratio(self, size: int, *, filler: CacheFiller, run: DeviceCall, budget: Budget) -> float:
        """Return the median ratio of their times."""
        need = await run(partial(self.need, size))
        await budget.acquire(need)
        try:
            jobs = await run(partial(self._prepared, size))
            ratios: list[float] = []
            taken = 0.0
            while len(ratios) < _MIN_ROUNDS or (len(ratios) < _MAX_ROUNDS and taken < _ENOUGH_S):
                seconds = await run(partial(rounds, jobs, filler))
                ratios.append(seconds[0] / seconds[1])
                taken += sum(seconds)
            return median(ratios)
        finally:
            budget.release(need)

    def _prepared(self, size: int) -> list[Job]:
        jobs = []
        for subject in (self.one, self.other):
            bound = subject.at(self.dimension, size)
            module, request = plainest(subject.kernel_of(bound), bound, subject.taps)
            jobs.append(forward.prepare(module, request, subject.place.device.exact(), subject.place.capacity))
        return jobs


def plainest(kernel: str, blank: BoundRequest, taps: Collection[str]) -> tuple[Module | None, ForwardRequest]:
    """Return a forward request of the sizes of a blank one, with these taps and no other options, and its module.

    All numbers are random: times do not depend on them, unless they are zeros or not finite.
    """
    rng, sizes, dtype = np.random.default_rng(0), blank.sizes, DTYPES[blank.dtype]

    def drawn(shape: Sequence[int], scale: float = 1.0, shift: float = 0.0) -> Array:
        pool = rng.standard_normal(_POOL, np.float32) * np.float32(scale) + np.float32(shift)
        return np.resize(pool, shape).astype(dtype)

    rest: dict[str, Any] = {name: drawn(array.shape) for name, array in blank.arrays.items() if name in _DRAWN_TENSORS}
    rest["return"] = sorted(taps)
    if approximation_of(blank.spec) is None:
        rest["kernel"] = kernel
    if sizes is None:
        learned = {name: drawn(array.shape, 0.02, 1.0) for name, array in blank.learned.items()}
        return None, RawForwardRequest(**rest, spec=blank.spec, parameters=learned)
    config = sizes.config(blank.dtype)
    parameters = {name: to_torch(drawn(shape, 0.02)) for name, shape in parameter_shapes(sizes).items()}
    version = sha256(config.model_dump_json().encode()).hexdigest()[:32]  # by which requests to it are known again
    return Module.of("drawn", config, parameters, version=version), ForwardRequest(**rest)

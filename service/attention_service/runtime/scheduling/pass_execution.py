"""A pass: the jobs that run at once, and the answer to each of them, whatever becomes of the others."""

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from attention_contract.base import valid
from attention_contract.errors import DeadlineExceeded, Draining, NeverFits
from attention_contract.schemas.attention import Ran
from attention_service.core.cancellation import Abandoned, Cancellation, cancellable
from attention_service.cost import Clock
from attention_service.runtime.callers import caller as asking
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.planning.prediction_accuracy import Run
from attention_service.runtime.scheduling.batches import Batch
from attention_service.runtime.scheduling.jobs import Job, Prepared
from attention_service.runtime.scheduling.operation import Fields

# Made for each request, so none is frozen: a frozen one takes five times as long to make.


@dataclass(slots=True)
class JobResult:
    """The result of one job."""

    fields: Fields
    plan: Plan
    """The plan of the whole pass."""
    queued: float
    """Seconds between admission and execution."""
    seconds: float
    """Seconds of the whole pass on the device."""
    processor: float
    """Seconds for which the thread of the pass had a processor."""
    batch: int = 1
    """Requests in the pass."""


def ran_of(job: Job, ended: JobResult, device: Device) -> Ran:
    """The reply's account of a job."""
    own, plan = job.prepared.plan, ended.plan
    predicted = plan.predicted
    return valid(
        Ran,
        {
            "kernel": plan.kernel,
            "device": device.place,
            "dtype": job.prepared.dtype,
            "version": None if job.module is None or job.bound.learned else job.module.version,
            "flops": own.flops,
            "predicted_ms": predicted.median * 1e3,
            "predicted_low_ms": predicted.low * 1e3,
            "predicted_high_ms": predicted.high * 1e3,
            "compute_ms": ended.seconds * 1e3,
            "cpu_ms": ended.processor * 1e3,
            "queue_ms": ended.queued * 1e3,
            "batch": ended.batch,
            "peak_bytes": own.peak_bytes,
        },
    )


@dataclass(eq=False, slots=True)
class Waiting:
    """An admitted job, or other work on the device, which has no job."""

    done: "asyncio.Future[Any]"
    work: Callable[[], Any]
    job: Job | None
    clock: Clock
    """The clock that planned it."""
    deadline: float | None = None
    """``time.monotonic`` seconds; the job does not begin after it."""
    admitted: float = field(default_factory=time.monotonic)
    group: Hashable = None
    """Equal for jobs that can run in one pass; None for one that runs alone."""
    caller: str = field(default_factory=lambda: asking.get().name)

    @property
    def predicted(self) -> float:
        """The predicted seconds of a job; 0 for other work."""
        return 0.0 if self.job is None else self.job.plan.predicted.median


@dataclass(slots=True)
class Observation:
    """One run, for the statistics."""

    prepared: Prepared
    """The first job of the run."""
    plan: Plan
    """The plan of the whole run."""
    clock: Clock
    at: float
    """The time when it ended."""
    seconds: float
    peak_bytes: int | None
    """Measured; None if the device cannot measure it."""
    processor: float
    """Seconds for which the thread of the run had a processor."""
    on_gpu: bool
    batch: int = 1
    alone: bool = True
    """True if no long work ran at the same time."""

    @property
    def run(self) -> Run:
        """The run, with its prediction."""
        plan = self.plan
        purpose, peaks = self.prepared.purpose, (plan.peak_bytes, self.peak_bytes)
        # On a GPU the processor launches the work alone, and its time says nothing of the device's.
        processor = self.seconds if self.on_gpu else min(self.processor, self.seconds)
        return Run(plan.kernel, purpose, plan.predicted, self.seconds, *peaks, self.batch, processor)


@dataclass(slots=True)
class PassResult:
    """The outcome of a pass."""

    answers: list[Any] = field(default_factory=list)
    """For each of the waiting: an ``JobResult``, the result of other work, the fault, or None if nobody waits."""
    runs: list[Observation] = field(default_factory=list)
    """The runs that ended well."""


@dataclass(eq=False, slots=True)
class Pass:
    """Jobs, or other work, that run at once."""

    taken: Sequence[Waiting]
    batch: Batch | None = None
    cancellation: Cancellation = field(default_factory=Cancellation)

    @property
    def plan(self) -> Plan | None:
        """The plan of the whole pass; None for work without a job."""
        if self.batch is not None:
            return self.batch.plan
        job = self.taken[0].job
        return None if job is None else job.plan

    @property
    def more(self) -> int:
        """Bytes beyond what the jobs are admitted for."""
        return 0 if self.batch is None else self.batch.more

    @property
    def abandoned(self) -> bool:
        """True if nobody waits for any of it."""
        return all(waiting.done.done() for waiting in self.taken)

    def run(self, device: Device) -> PassResult:
        """Run the pass; blocks. Jobs that fail together run again, each alone, so that only those at fault fail."""
        with cancellable(self.cancellation):
            if self.batch is not None:
                with suppress(Exception):  # whoever is at fault hears of it when it runs alone
                    return self._together(self.batch, device)
                device.give_back_cached()  # the pass may have run out of memory
            outcome = PassResult()
            for waiting in self.taken:
                outcome.answers.append(None if waiting.done.done() else _alone(waiting, device, outcome.runs))
            return outcome

    def _together(self, batch: Batch, device: Device) -> PassResult:
        fields, started, ended, processor, peak = _timed(lambda: batch.run(device.torch), device)
        answers = [
            JobResult(each, batch.plan, started - waiting.admitted, ended - started, processor, len(fields))
            for waiting, each in zip(self.taken, fields, strict=True)
        ]
        clock, prepared = self.taken[0].clock, batch.jobs[0].prepared
        seconds, on_gpu = ended - started, device.is_cuda
        seen = Observation(prepared, batch.plan, clock, ended, seconds, peak, processor, on_gpu, len(fields))
        return PassResult(answers, [seen])


def run_alone(job: Job, clock: Clock, admitted: float, device: Device) -> tuple[JobResult, Observation]:
    """Run a job by itself; blocks. Raises what the job raises, but NeverFits if memory runs out."""
    try:
        fields, started, ended, processor, peak = _timed(job.run, device)
    except Exception as fault:
        if _out_of_memory(fault):
            raise _never_fits(job) from fault
        device.note(fault)
        raise
    seconds = ended - started
    return JobResult(fields, job.plan, started - admitted, seconds, processor), Observation(
        job.prepared, job.plan, clock, ended, seconds, peak, processor, device.is_cuda
    )


def draining() -> Draining:
    """The refusal of a server that stops."""
    return Draining("the server is stopping; try another, or this one once it is back")


def late() -> DeadlineExceeded:
    """The refusal of a request whose deadline passed before it began."""
    return DeadlineExceeded(
        "the request could not begin before its deadline; allow it more time, or ask when less is waiting"
    )


def _alone(waiting: Waiting, device: Device, runs: list[Observation]) -> Any:
    """The answer to one of the waiting. A job that ends well is added to the runs."""
    try:
        if waiting.job is None:
            device.await_parameters()
            return waiting.work()
        ended, observation = run_alone(waiting.job, waiting.clock, waiting.admitted, device)
    except Abandoned:  # the caller left, or the server stops
        return draining()
    except Exception as fault:  # raised again where the result is awaited
        return fault
    runs.append(observation)
    return ended


def _timed(work: Callable[[], Any], device: Device) -> tuple[Any, float, float, float, int | None]:
    """Return the result, its begin and end, the processor's seconds on this thread, and the measured peak."""
    device.await_parameters()
    peak = device.peak_meter()
    started, busy = time.monotonic(), time.thread_time()
    result = work()
    return result, started, time.monotonic(), time.thread_time() - busy, peak()


def _out_of_memory(fault: Exception) -> bool:
    # The CPU allocator has no exception of its own.
    told = isinstance(fault, RuntimeError) and "can't allocate memory" in str(fault)
    return told or isinstance(fault, torch.OutOfMemoryError | MemoryError)


def _never_fits(job: Job) -> NeverFits:
    return NeverFits(
        f"the device ran out of memory, though the estimate was {job.plan.peak_bytes} bytes; "
        "ask for fewer queries, heads or taps at a time",
        needed_bytes=job.plan.peak_bytes,
    )

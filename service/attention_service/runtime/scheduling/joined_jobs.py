"""A pass: the jobs that run at once, and the answer to each of them, whatever becomes of the others."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from attention_contract.errors import AttentionError, Draining, NeverFits
from attention_contract.schemas.attention import Ran
from attention_service.core.cancellation import Abandoned, Cancellation, cancellable
from attention_service.cost import Clock
from attention_service.runtime.device import Device
from attention_service.runtime.operations.operation import Fields
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.planning.prediction_accuracy import Run
from attention_service.runtime.scheduling.batches import Batch
from attention_service.runtime.scheduling.jobs import Job

# Made for each request, so none is frozen: a frozen one takes five times as long to make.


@dataclass(slots=True)
class Ended:
    """The result of one job."""

    fields: Fields
    plan: Plan
    """The plan of the whole pass."""
    queued: float
    """Seconds between admission and execution."""
    seconds: float
    """Seconds of the whole pass on the device."""
    batch: int = 1
    """Requests in the pass."""


def ran(own: Plan, dtype: str, version: str | None, ended: Ended, device: Device) -> Ran:
    """The reply's account of a job; ``own``: the plan of it alone; ``version``: that of its module."""
    plan = ended.plan
    return Ran(
        kernel=plan.kernel,
        device=device.place,
        dtype=dtype,
        version=version,
        flops=own.flops,
        predicted_ms=plan.predicted.median * 1e3,
        predicted_low_ms=plan.predicted.low * 1e3,
        predicted_high_ms=plan.predicted.high * 1e3,
        compute_ms=ended.seconds * 1e3,
        queue_ms=ended.queued * 1e3,
        batch=ended.batch,
        peak_bytes=own.peak_bytes,
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


@dataclass(slots=True)
class Seen:
    """One run, for the statistics."""

    run: Run
    clock: Clock
    at: float
    """The time when it ended."""
    watched: bool
    """True if a calibration measures requests of this kind."""


@dataclass(slots=True)
class Gone:
    """The outcome of a pass."""

    answers: list[Any] = field(default_factory=list)
    """For each of the waiting: an ``Ended``, the result of other work, the fault, or None if nobody waits."""
    runs: list[Seen] = field(default_factory=list)
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

    def run(self, device: Device) -> Gone:
        """Run the pass; blocks. Jobs that fail together run again, each alone, so that only those at fault fail."""
        device.await_parameters()
        with cancellable(self.cancellation):
            if self.batch is not None:
                with suppress(Exception):  # whoever is at fault hears of it when it runs alone
                    return self._together(self.batch, device)
            gone = Gone()
            for waiting in self.taken:
                answer, seen = alone(waiting, device) if not waiting.done.done() else (None, None)
                gone.answers.append(answer)
                if seen is not None:
                    gone.runs.append(seen)
            return gone

    def _together(self, batch: Batch, device: Device) -> Gone:
        fields, started, ended, peak = _timed(lambda: batch.run(device.torch), device)
        answers = [
            Ended(each, batch.plan, started - waiting.admitted, ended - started, len(fields))
            for waiting, each in zip(self.taken, fields, strict=True)
        ]
        seen = _seen(batch.jobs[0], self.taken[0].clock, batch.plan, started, ended, peak, len(fields))
        return Gone(answers, [seen])


def alone(waiting: Waiting, device: Device) -> tuple[Any, Seen | None]:
    """The answer to a job that runs by itself, and its run if that ended well; blocks."""
    job = waiting.job
    try:
        result, started, ended, peak = _timed(waiting.work, device)
    except AttentionError as fault:
        return fault, None
    except Abandoned:
        return draining(), None  # the caller left, or the server stops
    except Exception as fault:  # raised again where the result is awaited
        return _as_told(fault, job), None
    if job is None:
        return result, None
    seen = _seen(job, waiting.clock, job.plan, started, ended, peak)
    return Ended(result, job.plan, started - waiting.admitted, ended - started), seen


def draining() -> Draining:
    """The refusal of a server that stops."""
    return Draining("the server is stopping; try another, or this one once it is back")


def _seen(job: Job, clock: Clock, plan: Plan, started: float, ended: float, peak: int | None, batch: int = 1) -> Seen:
    run = Run(plan.kernel, job.purpose, plan.predicted, ended - started, plan.peak_bytes, peak, batch)
    return Seen(run, clock, ended, job.watched)


def _timed(work: Callable[[], Any], device: Device) -> tuple[Any, float, float, int | None]:
    peak = device.peak_meter()
    started = time.monotonic()
    result = work()
    return result, started, time.monotonic(), peak()


def _as_told(fault: Exception, job: Job | None) -> Exception:
    """The fault that the caller hears of: NeverFits if memory ran out."""
    full = isinstance(fault, torch.OutOfMemoryError | MemoryError)
    # The CPU allocator has no exception of its own.
    if job is None or not (full or (isinstance(fault, RuntimeError) and "can't allocate memory" in str(fault))):
        return fault
    refusal = NeverFits(
        f"the device ran out of memory, though the estimate was {job.plan.peak_bytes} bytes; "
        "ask for fewer queries, heads or taps at a time",
        needed_bytes=job.plan.peak_bytes,
    )
    refusal.__cause__ = fault
    return refusal

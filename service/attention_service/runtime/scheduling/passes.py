"""What runs at once on a device, and how it went: each request's own answer, whatever became of the others."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from attention_contract.errors import AttentionError, NeverFits
from attention_contract.schemas.attention import Ran
from attention_service.cost import Clock
from attention_service.runtime.device import Device
from attention_service.runtime.operations.operation import Fields
from attention_service.runtime.planning.accuracy import Run
from attention_service.runtime.planning.planner import Plan
from attention_service.runtime.scheduling.batching import Batch
from attention_service.runtime.scheduling.jobs import Job


class Answer(Protocol):
    """Who waits for a result; an ``asyncio.Future`` is one."""

    def done(self) -> bool:
        """Whether nobody waits any more."""

    def set_result(self, result: Any) -> None:
        """It ended well."""

    def set_exception(self, exception: BaseException) -> None:
        """It did not."""


# Made for each request, so none is frozen: that takes five times as long to make.


@dataclass(slots=True)
class Ended:
    """How one job went."""

    fields: Fields
    plan: Plan
    """Of all that ran at once."""
    queued: float
    """Seconds between admission and execution."""
    seconds: float
    """On the device, for all that ran at once."""
    batch: int = 1
    """How many requests ran at once."""


def ran(own: Plan, dtype: str, version: str | None, ended: Ended, device: Device) -> Ran:
    """What is said of a job that ended; ``own``: what was planned of it alone; ``version``: of its module."""
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
    """A job that was admitted; or other work on the device, which has no job."""

    done: Answer
    work: Callable[[], Any]
    job: Job | None
    clock: Clock
    """By which it was planned."""
    deadline: float | None = None
    """Of ``time.monotonic``: what has not begun by then is not begun any more."""
    admitted: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class Seen:
    """One run, for those who watch."""

    run: Run
    clock: Clock
    at: float
    """When it ended."""
    watched: bool
    """Whether requests of its kind are among those that a calibration measures."""


@dataclass(slots=True)
class Pass:
    """What runs at once."""

    taken: Sequence[Waiting]
    batch: Batch | None = None

    @property
    def plan(self) -> Plan | None:
        """Of all of it; None for what has none."""
        if self.batch is not None:
            return self.batch.plan
        job = self.taken[0].job
        return None if job is None else job.plan

    @property
    def more(self) -> int:
        """Bytes that it needs beyond what its requests are admitted for."""
        return 0 if self.batch is None else self.batch.more

    def run(self, device: Device) -> "Gone":
        """Run it; it blocks. Where requests fail together each runs alone, so that only those at fault do."""
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

    def _together(self, batch: Batch, device: Device) -> "Gone":
        fields, started, ended, peak = _timed(batch.run, device)
        answers = [
            Ended(each, batch.plan, started - waiting.admitted, ended - started, len(fields))
            for waiting, each in zip(self.taken, fields, strict=True)
        ]
        first = self.taken[0]
        if first.job is None:
            return Gone(answers)
        return Gone(answers, [_seen(first.job, first.clock, batch.plan, started, ended, peak, len(fields))])


@dataclass(slots=True)
class Gone:
    """How a pass went."""

    answers: list[Any] = field(default_factory=list)
    """Of each that was taken: an ``Ended``, what other work gave, or the fault."""
    runs: list[Seen] = field(default_factory=list)
    """Those that ended well."""


def alone(waiting: Waiting, device: Device) -> tuple[Any, Seen | None]:
    """The answer to what runs by itself, as of ``Gone``, and its run where that ended well; it blocks."""
    job = waiting.job
    try:
        given, started, ended, peak = _timed(waiting.work, device)
    except AttentionError as fault:
        return fault, None
    except Exception as fault:  # raised again where it is waited for
        return _told(fault, job), None
    if job is None:
        return given, None
    seen = _seen(job, waiting.clock, job.plan, started, ended, peak)
    return Ended(given, job.plan, started - waiting.admitted, ended - started), seen


def _seen(job: Job, clock: Clock, plan: Plan, started: float, ended: float, peak: int | None, batch: int = 1) -> Seen:
    run = Run(plan.kernel, job.purpose, plan.predicted, ended - started, plan.peak_bytes, peak, batch)
    return Seen(run, clock, ended, job.watched)


def _timed(work: Callable[[], Any], device: Device) -> tuple[Any, float, float, int | None]:
    peak = device.peak_meter()
    started = time.monotonic()
    given = work()
    return given, started, time.monotonic(), peak()


def _told(fault: Exception, job: Job | None) -> Exception:
    """A fault as the caller hears of it."""
    full = isinstance(fault, torch.OutOfMemoryError | MemoryError)
    # The CPU allocator has no exception of its own.
    if job is None or not (full or (isinstance(fault, RuntimeError) and "can't allocate memory" in str(fault))):
        return fault
    told = NeverFits(
        f"the device ran out of memory, though the estimate was {job.plan.peak_bytes} bytes; "
        "ask for fewer queries, heads or taps at a time",
        needed_bytes=job.plan.peak_bytes,
    )
    told.__cause__ = fault
    return told

"""A pass: the jobs that run at once, and the answer to each of them, whatever becomes of the others."""

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from attention_contract.base import valid
from attention_contract.errors import DeadlineExceeded, Draining, NeverFits
from attention_contract.schemas.attention import Ran
from attention_service.core.cancellation import Abandoned, Cancellation, cancellable
from attention_service.cost import Clock
from attention_service.runtime.callers import caller as current_caller
from attention_service.runtime.device.torch_device import Device, is_out_of_memory
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.planning.prediction_accuracy import TimedRun
from attention_service.runtime.scheduling.batches import Batch
from attention_service.runtime.scheduling.jobs import Job, Prepared
from attention_service.runtime.scheduling.operation import Fields

# Made for each request, so none is frozen: a frozen one takes five times as long to make.


@dataclass(slots=True)
class PassRun:
    """The run of one pass, for the replies of its jobs and for the statistics."""

    prepared: Prepared
    """The first job of the pass."""
    plan: Plan
    """The plan of the whole pass."""
    clock: Clock
    """The clock that planned it."""
    began: float
    ended: float
    processor: float
    """Seconds for which the thread of the pass had a processor."""
    peak_bytes: int | None
    """Measured; None if the device cannot measure it."""
    on_gpu: bool
    batch: int = 1
    """Requests in the pass."""
    alone: bool = True
    """True if no long work ran at the same time."""

    @property
    def run(self) -> TimedRun:
        """The run, with its prediction."""
        plan, seconds = self.plan, self.ended - self.began
        purpose, peaks = self.prepared.purpose, (plan.peak_bytes, self.peak_bytes)
        # On a GPU the processor launches the work alone, and its time says nothing of the device's.
        processor = seconds if self.on_gpu else min(self.processor, seconds)
        return TimedRun(plan.kernel, purpose, plan.predicted, seconds, *peaks, self.batch, processor)


JobResult = tuple[Fields, PassRun]
"""The reply's fields of one job, and the run of its pass."""


def ran_of(job: Job, run: PassRun, admitted: float, device: Device) -> Ran:
    """The reply's account of a job that was admitted at a time of ``time.monotonic``."""
    prepared, module, predicted = job.prepared, job.module, run.plan.predicted
    return valid(
        Ran,
        {
            "kernel": run.plan.kernel,
            "device": device.place,
            "dtype": prepared.dtype,
            "version": None if module is None or job.bound.learned else module.version,
            "flops": prepared.plan.flops,
            "predicted_ms": predicted.median * 1e3,
            "predicted_low_ms": predicted.low * 1e3,
            "predicted_high_ms": predicted.high * 1e3,
            "compute_ms": (run.ended - run.began) * 1e3,
            "cpu_ms": run.processor * 1e3,
            "queue_ms": (run.began - admitted) * 1e3,
            "batch": run.batch,
            "peak_bytes": prepared.plan.peak_bytes,
        }
        | ({"tf32": True} if device.tf32 and prepared.dtype == "float32" else {}),
    )


@dataclass(eq=False, slots=True)
class WaitingJob:
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
    caller: str = field(default_factory=lambda: current_caller.get().name)

    @property
    def predicted(self) -> float:
        """The predicted seconds of a job; 0 for other work."""
        return 0.0 if self.job is None else self.job.prepared.plan.predicted.median


@dataclass(slots=True)
class PassResult:
    """The outcome of a pass."""

    answers: list[Any] = field(default_factory=list)
    """For each of the waiting: a ``JobResult``, the result of other work, the fault, or None if nobody waits."""
    runs: list[PassRun] = field(default_factory=list)
    """The runs that ended well."""


@dataclass(eq=False, slots=True)
class Pass:
    """Jobs, or other work, that run at once."""

    taken: Sequence[WaitingJob]
    batch: Batch | None = None
    cancellation: Cancellation = field(default_factory=Cancellation)

    @property
    def plan(self) -> Plan | None:
        """The plan of the whole pass; None for work without a job."""
        if self.batch is not None:
            return self.batch.plan
        job = self.taken[0].job
        return None if job is None else job.prepared.plan

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
                try:
                    return self._together(self.batch, device)
                except Exception as fault:  # whoever is at fault hears of it when it runs alone
                    device.recover(fault)
            outcome = PassResult()
            for waiting in self.taken:
                outcome.answers.append(None if waiting.done.done() else _alone(waiting, device, outcome.runs))
            return outcome

    def _together(self, batch: Batch, device: Device) -> PassResult:
        first = self.taken[0]
        fields, run = _timed(partial(batch.run, device.torch), batch.jobs[0].prepared, batch.plan, first.clock, device)
        run.batch = len(fields)
        return PassResult([(job_fields, run) for job_fields in fields], [run])


def run_alone(job: Job, clock: Clock, device: Device) -> JobResult:
    """Run a job by itself; blocks.

    Raises what the job raises, but NeverFits if memory runs out, and Stuck if the device is broken, maybe by this job.
    """
    try:
        return _timed(job.run, job.prepared, job.prepared.plan, clock, device)
    except Exception as fault:
        device.recover(fault)
        device.check()
        if not is_out_of_memory(fault):
            raise
    raise _never_fits(job)  # here it has no context, which would hold what failed


def _timed(
    work: Callable[[], Any], prepared: Prepared, plan: Plan, clock: Clock, device: Device
) -> tuple[Any, PassRun]:
    """Run a pass, and measure it."""
    peak = None
    if on_gpu := device.is_cuda:
        device.check()
        device.await_parameters()
        peak = device.peak_meter()
    began, busy = time.monotonic(), time.thread_time()
    result = work()
    ended, processor = time.monotonic(), time.thread_time() - busy
    return result, PassRun(prepared, plan, clock, began, ended, processor, None if peak is None else peak(), on_gpu)


def draining() -> Draining:
    """The refusal of a server that stops."""
    return Draining("the server is stopping; send the request to another server, or again later")


def late() -> DeadlineExceeded:
    """The refusal of a request whose deadline passed before it began."""
    return DeadlineExceeded(
        "the request could not begin before its deadline; allow more time, or send it when fewer requests wait"
    )


def _alone(waiting: WaitingJob, device: Device, runs: list[PassRun]) -> Any:
    """The answer to one of the waiting. A job that ends well is added to the runs."""
    try:
        if waiting.job is None:
            return _other_work(waiting.work, device)
        result = run_alone(waiting.job, waiting.clock, device)
    except Abandoned:  # the caller left, or the server stops
        return draining()
    except Exception as fault:  # raised again where the result is awaited
        return fault
    runs.append(result[1])
    return result


def _other_work(work: Callable[[], Any], device: Device) -> Any:
    """The result of work without a job."""
    device.check()
    try:
        device.await_parameters()
        return work()
    except Exception as fault:
        device.recover(fault)
        raise


def _never_fits(job: Job) -> NeverFits:
    return NeverFits(
        f"the device ran out of memory, though the estimate was {job.prepared.plan.peak_bytes} bytes; "
        "ask for fewer queries, heads or taps at a time",
        needed_bytes=job.prepared.plan.peak_bytes,
    )

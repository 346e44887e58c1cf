"""The executor: a job is admitted, waits for its turn, runs, alone or joined with others, and gives its memory back.

An admitted job waits in the queue of its lane, where callers get equal shares of the predicted time. Short jobs have a
lane of their own, so that they do not wait behind long ones; both lanes run at the same time. The smallest jobs run on
the event loop: handing them to a thread would take longer. Jobs that arrive in one turn of the event loop can run in
one pass (``batches``): a job whose like came in the same turn waits for the end of the turn. Others wait for nobody.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from statistics import median
from typing import Any, Protocol, TypeVar

import torch

from attention_contract.errors import AttentionError, TooLong
from attention_contract.schemas.attention import Ran
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.request_timing import note_run
from attention_service.runtime.scheduling.batches import choose
from attention_service.runtime.scheduling.budget import Budget
from attention_service.runtime.scheduling.jobs import Job
from attention_service.runtime.scheduling.lane import Lane
from attention_service.runtime.scheduling.operation import Fields
from attention_service.runtime.scheduling.passes import (
    JobResult,
    Pass,
    PassResult,
    PassRun,
    WaitingJob,
    draining,
    late,
    ran_of,
    run_alone,
)
from attention_service.runtime.scheduling.watchdog import Watchdog

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

HAND_OFF_SHARE = 0.02
"""Work goes to a thread if that adds no more than this share to its time, by the median of its prediction."""
LONGEST_HOLD_S = 5e-3
"""Work also goes to a thread if it might hold the event loop for longer, by the upper bound of its prediction. Passes
that follow one another hold the loop about as long."""
_HAND_OFFS, _PAUSE_S = 25, 1e-3
"""Hand-offs that are timed, and seconds before each: a thread that has just run wakes faster than usual."""
_SIDE = 128
"""Side of the matrices that are multiplied, since a hand-off also slows down the work that is handed over."""


class DeviceCall(Protocol):
    """Runs something on the device's thread."""

    def __call__(self, work: Callable[[], ResultT]) -> Awaitable[ResultT]:
        """Return its result."""


class Executor:
    """Runs admitted work on one device. Used from the event loop only."""

    def __init__(
        self,
        device: Device,
        budget: Budget,
        watch: Callable[[PassRun], None],
        watchdog: Watchdog,
        max_predicted_s: float | None = None,
        host: Budget | None = None,
    ) -> None:
        """``watch`` receives every run that ended well. ``max_predicted_s``: the longest that is admitted.

        host: the budget of the host's memory beside a GPU; None if the device's is the host's.
        """
        self.hold_s = 0.0
        """Jobs that might take longer go to a thread. Set by ``measure``."""
        self.expects_mates = False
        """True if most jobs of the last turn came beside one that can run in the same pass."""
        self.device = device
        self._budget = budget
        self._host = host
        self._watch = watch
        self._max_predicted_s = max_predicted_s
        self._short, self._long = Lane(device, watchdog, long=False), Lane(device, watchdog, long=True)
        self._turn: asyncio.Handle | None = None
        """The end of this turn, if a job came."""
        self._turn_began = 0.0
        self._capturing: asyncio.Future[None] | None = None
        self._came = 0
        """Jobs that came in this turn."""
        self._groups: set[Hashable] = set()
        """The groups of these jobs; a number for each that runs alone."""

    async def measure(self) -> None:
        """Time a hand-off to a thread and back, which decides what runs on the event loop.

        Nothing runs there for a GPU, which would have to be waited for. On a single core a thread gains nothing.
        """
        if self.device.is_cuda:
            return
        if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == 1:
            self.hold_s = LONGEST_HOLD_S
            return
        matrix = torch.rand(_SIDE, _SIDE)
        here, there = [], []
        for _ in range(_HAND_OFFS):
            await asyncio.sleep(_PAUSE_S)
            started = time.perf_counter()
            torch.mm(matrix, matrix)
            here.append(time.perf_counter() - started)
            await asyncio.sleep(_PAUSE_S)
            started = time.perf_counter()
            await self._call(partial(torch.mm, matrix, matrix), self._short)
            there.append(time.perf_counter() - started)
        self.hold_s = min(max(median(there) - median(here), 0.0) / HAND_OFF_SHARE, LONGEST_HOLD_S)

    async def run(self, job: Job, deadline: float | None = None) -> tuple[Fields, Ran]:
        """Run a job, if it can begin before a deadline (``time.monotonic`` seconds); return its fields, and what ran.

        If the caller is cancelled, a job that waits leaves the queue, and a running one stops at its next checkpoint;
        its memory is free then. Raises what the budget does, TooLong, DeadlineExceeded, Draining, NeverFits if the
        device runs out of memory after all, and what the job raises.
        """
        came, clock, plan = time.monotonic(), self.device.clock, job.prepared.plan
        if self._max_predicted_s is not None:
            self._check_length(plan)
        # Admit: its memory is taken at once, or it waits for it.
        if self._host is not None or not self._budget.take(plan.peak_bytes):
            await self._admit(job, deadline)
        # Its turn: at once if nobody waits or runs before it and none of its kind comes beside it.
        lane = self._short if job.prepared.is_short else self._long
        admitted, group = time.monotonic(), job.group
        now = self._begins(group, lane, admitted)
        if now and (deadline is None or admitted < deadline) and self._stays(plan):
            # Run it here, and give its memory back.
            try:
                fields, run = run_alone(job, clock, self.device)
            finally:
                self._release(job)
            self._observe(run)
        else:
            # Wait for a pass of its lane, alone or with its kind. The pass gives the memory back.
            done = asyncio.get_running_loop().create_future()
            waiting = WaitingJob(done, job.run, job, clock, deadline, admitted, group)
            result: JobResult = await self._through(waiting, lane, now=now)
            fields, run = result
        ran = ran_of(job, run, admitted, self.device)
        note_run(came, ran)
        return fields, ran

    def _check_length(self, plan: Plan) -> None:
        predicted, most = plan.predicted.median, self._max_predicted_s
        if most is not None and predicted > most:
            raise TooLong(
                f"the request is predicted to compute for {predicted:.3g} s; max_predicted_s allows {most:g}. Ask for "
                "less at a time; /complexity predicts the time of a shape",
                limit_s=most,
                predicted_s=predicted,
            )

    async def _admit(self, job: Job, deadline: float | None) -> None:
        """Wait for the memory of a job; the host's comes first, so that nobody waits with the device's in hand."""
        host, plan = None, job.prepared.plan
        try:
            async with asyncio.timeout_at(deadline):  # the loop's clock is the monotonic one
                if self._host is not None:
                    await self._host.acquire(plan.host_bytes)
                    host = self._host
                await self._budget.acquire(plan.peak_bytes)
        except BaseException as fault:
            if host is not None:
                host.release(plan.host_bytes)
            if job.ending is not None:
                job.ending.now()
            if isinstance(fault, TimeoutError):
                raise late() from None
            raise

    async def call(self, work: Callable[[], ResultT]) -> ResultT:
        """Run other work in the queue of the long jobs."""
        return await self._call(work, self._long)

    async def warm_up(self, work: Callable[[], object]) -> None:
        """Run some work on each thread."""
        for lane in (self._short, self._long):
            await self._call(work, lane)

    async def renew(self) -> None:
        """Replace the threads once what runs has ended, which frees what libraries keep for each thread."""
        for lane in (self._short, self._long):
            await lane.renew()

    async def stop(self) -> None:
        """Refuse what waits, and stop what runs."""
        for lane in (self._short, self._long):
            for job in list(lane.waiting):
                lane.drop(job)
                _answer(job, draining())
                self._give_back(job)
        await asyncio.gather(self._short.stop(), self._long.stop())

    def leave(self, waiting: WaitingJob) -> None:
        """Give a job up: it leaves the queue, or stops at its next checkpoint if nobody else waits for its pass."""
        for lane in (self._short, self._long):
            if lane.remove(waiting):
                self._give_back(waiting)

    async def _call(self, work: Callable[[], ResultT], lane: Lane) -> ResultT:
        """Run other work in the queue of a lane."""
        waiting = WaitingJob(asyncio.get_running_loop().create_future(), work, None, self.device.clock)
        now = self._begins(None, lane, waiting.admitted)
        result: ResultT = await self._through(waiting, lane, now=now)
        return result

    async def _through(self, waiting: WaitingJob, lane: Lane, *, now: bool) -> Any:
        """Wait in the queue of a lane for the result. ``now``: begin the next pass at once."""
        loop = asyncio.get_running_loop()
        lane.add(waiting)
        if now:
            self._look(lane)
        timer = None if waiting.deadline is None else loop.call_at(waiting.deadline, self._expire, waiting, lane)
        try:
            return await waiting.done
        except asyncio.CancelledError:
            self.leave(waiting)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _begins(self, group: Hashable, lane: Lane, now: float) -> bool:
        """Note a job of a group that came, and return True if it may begin now.

        It waits for the end of the turn if others wait or run before it, or may run in one pass with it.
        """
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._end_turn)
            self._turn_began = now
        mates = group is not None and (self.expects_mates or group in self._groups)
        self._came += 1
        self._groups.add(self._came if group is None else group)
        held = now - self._turn_began > LONGEST_HOLD_S
        return not (mates or held or lane.waiting.size) and lane.running is None

    def _end_turn(self) -> None:
        """Begin what waits, pass after pass until a thread is busy or the event loop has been held for long enough."""
        self._turn = None
        if self._came:
            self.expects_mates = 2 * len(self._groups) <= self._came
            self._came = 0
            self._groups.clear()
        until = time.monotonic() + LONGEST_HOLD_S
        for lane in (self._short, self._long):
            while lane.waiting.size and lane.running is None:
                self._look(lane)
                if time.monotonic() > until:
                    break

    def _expire(self, waiting: WaitingJob, lane: Lane) -> None:
        """Refuse a job that has not begun by its deadline."""
        if waiting in lane.waiting:
            self.leave(waiting)
            _answer(waiting, late())

    def _look(self, lane: Lane) -> None:
        """Begin the next pass of a lane."""
        while lane.waiting.size and self._drops(lane.waiting.first(), lane):
            pass
        if not lane.waiting.size:
            return
        following = self._next(lane)
        if following.more:
            self._budget.take_more(following.more)
        if self._stays(following.plan):
            self._finish(following, following.run(self.device))
            return
        try:
            lane.submit(following, self._finish)
        except RuntimeError:  # the thread was stopped
            self._finish(following, PassResult([draining() for _ in following.taken]))

    def _drops(self, waiting: WaitingJob, lane: Lane) -> bool:
        """Drop a job that was given up in this turn, or whose deadline passed before its timer had a turn."""
        if waiting.done.done():
            lane.drop(waiting)
            self._give_back(waiting)
            return True
        if waiting.deadline is not None and waiting.deadline <= time.monotonic():
            self._expire(waiting, lane)
            return True
        return False

    def _next(self, lane: Lane) -> Pass:
        """Take the first job that waits, and those that run in one pass with it."""
        first = lane.waiting.first()
        mates = {} if lane.long else {mate.job: mate for mate in lane.mates(first) if not self._drops(mate, lane)}
        batch = None
        if len(mates) > 1:
            try:
                batch = choose([job for job in mates if job is not None], self._budget.unclaimed)
            except Exception:  # jobs that cannot be planned together run alone
                log.exception("requests could not be joined")
        taken = [first] if batch is None else [mates[job] for job in batch.jobs]
        lane.begin(taken)
        return Pass(taken, batch)

    def _stays(self, plan: Plan | None) -> bool:
        """True if a pass with this plan runs on the event loop."""
        if plan is None or plan.off_loop:
            return False
        return plan.predicted.median <= self.hold_s and plan.predicted.high <= max(LONGEST_HOLD_S, self.hold_s)

    def _finish(self, following: Pass, outcome: PassResult) -> None:
        """Give back the memory, answer everyone, and look at the queues at the end of this turn."""
        if following.more:
            self._budget.release_more(following.more)
        for waiting, answer in zip(following.taken, outcome.answers, strict=True):
            self._give_back(waiting)
            _answer(waiting, answer)
        if self._turn is None and (self._short.waiting.size or self._long.waiting.size):
            self._turn = asyncio.get_running_loop().call_soon(self._end_turn)
        for run in outcome.runs:
            self._observe(run)
        graphs = self.device.graphs
        if graphs.are_wanted and not (self._turn or self._short.running or self._short.waiting.size):
            self._capturing = asyncio.ensure_future(self._capture())

    async def _capture(self) -> None:
        """Capture a pass as a CUDA graph while nobody waits for the device."""
        try:
            await self._call(lambda: self.device.graphs.capture_next(self._budget.unclaimed), self._short)
        except AttentionError:  # the server stops, or the device is broken
            return
        except Exception:  # passes run without it
            log.exception("a pass could not be captured")

    def _observe(self, run: PassRun) -> None:
        """Report a run. Beside long work a short run takes longer, which says nothing of its own time."""
        run.alone = self._long.running is None
        self._watch(run)

    def _give_back(self, waiting: WaitingJob) -> None:
        if waiting.job is not None:
            self._release(waiting.job)

    def _release(self, job: Job) -> None:
        """Give back the memory of a job that ended, or that will not begin."""
        self._budget.release(job.prepared.plan.peak_bytes)
        if self._host is not None:
            self._host.release(job.prepared.plan.host_bytes)
        if job.ending is not None:
            job.ending.now()


def _answer(waiting: WaitingJob, answer: Any) -> None:
    if waiting.done.done():  # given up
        return
    if isinstance(answer, BaseException):
        waiting.done.set_exception(answer)
    else:
        waiting.done.set_result(answer)

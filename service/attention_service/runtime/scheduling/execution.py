"""Execution: one lane for each device, on which one thing runs at a time.

What was admitted waits in the order of its arrival. At the end of a turn of the event loop, or when the device falls
idle, the first that waits runs, together with what goes with it (``batching``): nobody waits for others to come. Where
in the turn before none came beside another, the first of a turn does not even wait for its end. What should be over
about as soon as it could be handed over runs where it is, on the event loop; all else on the device's thread, and until
that is idle nothing runs on the loop.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch

from attention_contract.errors import DeadlineExceeded, Draining
from attention_service.cost import Clock
from attention_service.runtime.device import Device
from attention_service.runtime.planning.planner import Plan
from attention_service.runtime.scheduling.batching import Joining, choose
from attention_service.runtime.scheduling.budget import Budget
from attention_service.runtime.scheduling.jobs import Job
from attention_service.runtime.scheduling.joining import Part
from attention_service.runtime.scheduling.passes import Answer, Ended, Gone, Pass, Seen, Waiting, alone
from attention_service.runtime.scheduling.saturation import Crowd

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

HAND_OFF_SHARE = 0.02
"""Work goes to the device's thread if that adds no more than this share to its time."""
LONGEST_HOLD_S = 5e-3
"""And always if it might hold the event loop for longer than this, by the upper bound of its prediction."""
_HAND_OFFS, _PAUSE_S = 25, 1e-3
"""How many are timed, and how long the thread is left alone before each: one that has just run wakes at once, but not
between requests."""
_SIDE = 128
"""Of the matrices that are multiplied: what a hand-off costs shows in the work that is handed over, too."""


class Execution:
    """Runs what was admitted on one device. Used from the event loop only."""

    def __init__(self, device: Device, budget: Budget, watch: Callable[[Seen], None]) -> None:
        """``watch`` is told of every run that ended well."""
        self.hold_s = 0.0
        """What might take longer goes to the device's thread. Set by ``measure``."""
        self.joining = Joining()
        self._device = device
        self._budget = budget
        self._watch = watch
        self._waiting: deque[Waiting] = deque()
        self._busy = False
        """Whether something runs on the device's thread."""
        self._turn: asyncio.Handle | None = None
        """The end of this turn of the event loop, where it is waited for."""
        self._came = 0
        """How many came in this turn."""
        self.came_before = 0
        """How many came in the last turn in which any did."""
        self._crowd = Crowd()
        self._worker = self._thread()

    async def measure(self) -> None:
        """Time a hand-off to the thread and back, and the joining of requests; by these it is chosen what runs how.

        A GPU is waited for on its thread alone: nothing there is over sooner than it could be handed over.
        """
        self.joining = await self.call(Joining.measured)
        if self._device.is_cuda:
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
            await self.call(partial(torch.mm, matrix, matrix))
            there.append(time.perf_counter() - started)
        self.hold_s = min(max(median(there) - median(here), 0.0) / HAND_OFF_SHARE, LONGEST_HOLD_S)

    async def run(self, job: Job, deadline: float | None = None) -> Ended:
        """Admit a job and run it, if it can begin before a deadline (of ``time.monotonic``).

        Raises what the budget does, DeadlineExceeded, Draining, NeverFits where the device has no memory after all, and
        what the job raises. Given up before it begins, it never runs, and its memory is free at once; later, when it
        ends.
        """
        clock = self._device.clock
        if deadline is None:
            await self._budget.acquire(job.plan.peak_bytes)
        else:
            try:
                async with asyncio.timeout_at(deadline):  # the loop's clock is the monotonic one
                    await self._budget.acquire(job.plan.peak_bytes)
            except TimeoutError:
                raise _late() from None
        ended: Ended = await self._through(job.run, job, clock, deadline)
        return ended

    def begin(self, job: Job, answer: Answer) -> Waiting:
        """Run a job for which the budget's bytes were taken, and tell how it ended; maybe before this returns."""
        waiting = Waiting(answer, job.run, job, self._device.clock)
        self._begin(waiting)
        return waiting

    async def call(self, work: Callable[[], ResultT]) -> ResultT:
        """What other work gives, run on the device's thread in its turn."""
        result: ResultT = await self._through(work, None, self._device.clock)
        return result

    async def renew(self) -> None:
        """Go on with another thread, once what runs is over: what libraries kept for the old one is free then."""
        old, self._worker = self._worker, self._thread()
        await asyncio.to_thread(old.shutdown)

    async def stop(self) -> None:
        """Refuse what waits, and wait for what runs."""
        for waiting in self._waiting:
            _answer(waiting, _draining())
            self._give_back(waiting)
        self._waiting.clear()
        await asyncio.to_thread(self._worker.shutdown)

    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix=f"attention-{self._device.torch}")

    async def _through(
        self, work: Callable[[], Any], job: Job | None, clock: Clock, deadline: float | None = None
    ) -> Any:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        waiting = Waiting(future, work, job, clock, deadline)
        self._begin(waiting)
        timer = None if deadline is None else loop.call_at(deadline, self._expire, waiting)
        try:
            return await future
        except asyncio.CancelledError:
            self.leave(waiting)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _begin(self, waiting: Waiting) -> None:
        self._came += 1
        self._crowd.came += 1
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._end_turn)
        at_once = self._came == 1 and self.came_before <= 1 and not self._busy
        plan = None if waiting.job is None or waiting.deadline is not None else waiting.job.plan
        if at_once and not self._waiting and self._stays(plan):
            self._run_here(waiting)
            return
        self._waiting.append(waiting)
        if at_once:
            self._look()

    def _run_here(self, waiting: Waiting) -> None:
        """Run what comes while nothing else waits or runs, and is over at once."""
        self._crowd.waits(1)
        self._crowd.answers(1)
        answer, seen = alone(waiting, self._device)
        self._give_back(waiting)
        _answer(waiting, answer)
        if seen is not None:
            self._watch(seen)

    def _end_turn(self) -> None:
        self._turn = None
        if self._came:
            self._came, self.came_before = 0, self._came
        if self._waiting and not self._busy:
            self._look()

    def leave(self, waiting: Waiting) -> None:
        """Take what has not begun out of what waits."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            self._give_back(waiting)

    def _expire(self, waiting: Waiting) -> None:
        """Refuse what has not begun, its deadline being over."""
        if waiting in self._waiting:
            self.leave(waiting)
            _answer(waiting, _late())

    def _look_later(self) -> None:
        """At the end of this turn of the event loop: until then others may come, and answers go out."""
        if self._turn is None and not self._busy and self._waiting:
            self._turn = asyncio.get_running_loop().call_soon(self._end_turn)

    def _look(self) -> None:
        """Begin the next pass."""
        for waiting in [each for each in self._waiting if each.deadline is not None]:
            if waiting.deadline is not None and waiting.deadline <= time.monotonic():
                self._expire(waiting)  # its timer had no turn yet
        while self._waiting and self._waiting[0].done.done():  # given up in this very turn
            self._give_back(self._waiting.popleft())
        if not self._waiting:
            return
        following = self._next()
        self._crowd.answers(len(following.taken))
        if following.more:
            self._budget.take_more(following.more)
        if self._stays(following.plan):
            self._finish(following, following.run(self._device))
            return
        try:
            future = self._worker.submit(following.run, self._device)
        except RuntimeError:  # it was shut down
            self._finish(following, Gone([_draining() for _ in following.taken]))
            return
        self._busy = True
        loop = asyncio.get_running_loop()
        # Not the future itself in the function: it would hold itself, and with it all that was asked and answered.
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(self._handed_back, following, done))

    def _next(self) -> Pass:
        """What runs next, taken out of what waits: the first, and those that do better together with it."""
        first, crowded = self._waiting[0], self._crowd.waits(len(self._waiting))
        if len(self._waiting) == 1:
            self._waiting.popleft()
            return Pass([first])
        mates, batch = self._mates(first), None
        if len(mates) > 1:
            try:
                batch = choose(list(mates), self.joining, self._budget.spare, crowded=crowded)
            except Exception:  # what can't be planned together runs alone
                log.exception("requests could not be joined")
        if batch is None:
            self._waiting.popleft()
            return Pass([first])
        taken = [mates[part] for part in batch.parts]
        if len(taken) == len(self._waiting):
            self._waiting.clear()
        else:
            gone = set(taken)
            self._waiting = deque(each for each in self._waiting if each not in gone)
        return Pass(taken, batch)

    def _mates(self, first: Waiting) -> dict[Part, Waiting]:
        """Those that could run together with the first, itself included; none where it runs alone."""
        own = _part(first)
        if own is None:
            return {}
        return {
            part: each
            for each in self._waiting
            if (part := _part(each)) is not None and part.key == own.key and not each.done.done()
        }

    def _stays(self, plan: Plan | None) -> bool:
        """Whether what was planned so runs on the event loop."""
        return plan is not None and not plan.laborious and plan.predicted.high <= self.hold_s

    def _handed_back(self, following: Pass, future: "Future[Gone]") -> None:
        self._busy = False
        fault = future.exception()
        self._finish(following, future.result() if fault is None else Gone([fault] * len(following.taken)))

    def _finish(self, following: Pass, gone: Gone) -> None:
        """Give back the memory, answer everyone, and look at what waits when the answers are on their way."""
        if following.more:
            self._budget.release_more(following.more)
        for waiting, answer in zip(following.taken, gone.answers, strict=True):
            self._give_back(waiting)
            _answer(waiting, answer)
        self._look_later()
        for seen in gone.runs:
            self._watch(seen)

    def _give_back(self, waiting: Waiting) -> None:
        if waiting.job is not None:
            self._budget.release(waiting.job.plan.peak_bytes)


def _part(waiting: Waiting) -> Part | None:
    return None if waiting.job is None else waiting.job.part


def _answer(waiting: Waiting, answer: Any) -> None:
    if waiting.done.done():  # given up
        return
    if isinstance(answer, BaseException):
        waiting.done.set_exception(answer)
    else:
        waiting.done.set_result(answer)


def _late() -> DeadlineExceeded:
    return DeadlineExceeded(
        "the request could not begin before its deadline; allow it more time, or ask when less is waiting"
    )


def _draining() -> Draining:
    return Draining("the server is stopping; try another, or this one once it is back")

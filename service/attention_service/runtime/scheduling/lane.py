"""A lane: one thread of a device with the work that waits for it, one pass at a time."""

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.scheduling.fair_queue import FairQueue
from attention_service.runtime.scheduling.passes import Pass, PassResult, WaitingJob
from attention_service.runtime.scheduling.watchdog import Watchdog

_PATIENCE = 5
"""The niceness of the thread for long work: the system runs short work and the event loop first."""


class Lane:
    """One thread and its queue. Used from the event loop only."""

    def __init__(self, device: Device, watchdog: Watchdog, *, long: bool) -> None:
        self.long = long
        """True for the lane of long work, which gives way to the other."""
        self.waiting: FairQueue[WaitingJob] = FairQueue()
        """Changed by ``add``, ``begin`` and ``drop`` alone."""
        self._groups: Counter[Hashable] = Counter()
        self.running: Pass | None = None
        """The pass on the thread."""
        self._device = device
        self._watchdog = watchdog
        self._thread = self._started()

    def add(self, waiting: WaitingJob) -> None:
        """Put a job into the queue."""
        self.waiting.add(waiting)
        self._groups[waiting.group] += 1

    def mates(self, waiting: WaitingJob) -> list[WaitingJob]:
        """The waiting jobs that can run in one pass with one of them, which comes first."""
        group = waiting.group
        if group is None or self._groups[group] < 2:
            return [waiting]
        return [waiting, *(other for other in self.waiting if other.group == group and other is not waiting)]

    def begin(self, taken: Sequence[WaitingJob]) -> None:
        """Take jobs that begin out of the queue."""
        for waiting in taken:
            self.waiting.begin(waiting, waiting.predicted)
            self._leave_group(waiting)

    def drop(self, waiting: WaitingJob) -> None:
        """Take a job that ends before it began out of the queue."""
        self.waiting.remove(waiting)
        self._leave_group(waiting)

    def _leave_group(self, waiting: WaitingJob) -> None:
        self._groups[waiting.group] -= 1
        if not self._groups[waiting.group]:
            del self._groups[waiting.group]

    def submit(self, following: Pass, ended: Callable[[Pass, PassResult], None]) -> None:
        """Run a pass on the thread; ``ended`` hears of it on the event loop. Raises RuntimeError after ``stop``."""
        future = self._thread.submit(self._run, following)
        self.running = following
        loop = asyncio.get_running_loop()

        def after_pass(done: "Future[PassResult]") -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(hand_back, done)

        def hand_back(done: "Future[PassResult]") -> None:
            self.running = None
            fault = done.exception()
            ended(following, done.result() if fault is None else PassResult([fault] * len(following.taken)))

        future.add_done_callback(after_pass)

    def _run(self, following: Pass) -> PassResult:
        """In the thread: run a pass under the eyes of the watchdog."""
        plan = following.plan
        expected = 0.0 if plan is None else plan.predicted.high
        name = f"the {'long' if self.long else 'short'} lane of {self._device.place}"
        with self._watchdog.watching(name, following.cancellation, expected):
            return following.run(self._device)

    def remove(self, waiting: WaitingJob) -> bool:
        """Take a job out of the queue, or stop the running pass if nobody waits for it. True if it had not begun."""
        if waiting in self.waiting:
            self.drop(waiting)
            return True
        if self.running is not None and self.running.abandoned:
            self.running.cancellation.cancel()
        return False

    async def renew(self) -> None:
        """Replace the thread once its pass has ended, which frees what libraries keep for each thread."""
        old, self._thread = self._thread, self._started()
        await asyncio.to_thread(old.shutdown)

    async def stop(self) -> None:
        """Stop the running pass at its next checkpoint, and end the thread."""
        if self.running is not None:
            self.running.cancellation.cancel()
        await asyncio.to_thread(self._thread.shutdown)

    def _started(self) -> ThreadPoolExecutor:
        kind = "long" if self.long else "short"
        name = f"attention-{self._device.torch}-{kind}"
        return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=self._prepare)

    def _prepare(self) -> None:
        """In the thread: a stream of its own on a GPU; on a CPU less priority for long work.

        The threads of a parallel computation inherit the priority.
        """
        if self._device.is_cuda:
            self._device.use_own_stream(first=not self.long)
        elif self.long and hasattr(os, "setpriority"):
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PATIENCE)

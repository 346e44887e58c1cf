"""The line that every request takes: bound, planned, admitted, run."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import Literal, TypeVar

from attention_contract.errors import Loading, Unavailable
from attention_contract.schemas.attention import AttentionInputs, RawInputs
from attention_contract.schemas.gradients import GradientsRequest
from attention_service.core.cancellation import Cancellation, cancellable
from attention_service.modules.resident import Module
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.scheduling.batches import is_quick
from attention_service.runtime.scheduling.budget import Budget
from attention_service.runtime.scheduling.executor import Executor
from attention_service.runtime.scheduling.jobs import Job
from attention_service.runtime.scheduling.passes import draining
from attention_service.runtime.scheduling.watchdog import Watchdog

RequestT = TypeVar("RequestT", bound=AttentionInputs)
ResultT = TypeVar("ResultT")
State = Literal["loading", "ready", "draining"]
Prepare = Callable[[Module | None, RequestT, Device, int], Job]
"""Binds and plans a request of a module, or of raw attention, within so many bytes: an operation's ``prepare``."""


class RequestRunner:
    """Plans and runs the requests of one device. Used from the event loop only."""

    def __init__(
        self,
        executor: Executor,
        budget: Budget,
        watchdog: Watchdog,
        files: ThreadPoolExecutor,
        host: Budget,
    ) -> None:
        """``files``: threads for work on the store. ``host``: the budget of the host's memory; on a CPU the same."""
        self.device = executor.device
        self.budget = budget
        self.host = host
        self.executor = executor
        self.state: State = "loading"
        self.failure: str | None = None
        """The error that kept the store from being loaded at all."""
        self._watchdog = watchdog
        self._files = files
        self._planning = ThreadPoolExecutor(1, thread_name_prefix="attention-planning")

    def check_live(self) -> None:
        """Raise Stuck if the device is lost, or if a thread that plans or computes makes no progress."""
        self.device.check()
        self._watchdog.check()

    def check_ready(self) -> None:
        """Raise Loading, Draining or Stuck unless work is taken."""
        if self.device.lost is not None:
            self.check_live()
        if self.failure is not None:
            raise Unavailable(f"the store could not be loaded ({self.failure}); the server's log has the cause")
        if self.state == "loading":
            raise Loading("the modules of the store are still being loaded; try again in a moment")
        if self.state == "draining":
            raise draining()

    async def planned(self, prepare: Prepare[RequestT], module: Module | None, request: RequestT) -> Job:
        """Bind and plan here if that is quick, otherwise beside the event loop."""
        if quickly_planned(module, request):
            return prepare(module, request, self.device, self.budget.capacity)
        make = partial(prepare, module, request, self.device, self.budget.capacity)
        return await self.in_thread(make, self._planning, "planning")

    async def stop(self) -> None:
        """Let the threads go, once what runs on them has ended."""
        for threads in (self._files, self._planning):
            await asyncio.to_thread(partial(threads.shutdown, cancel_futures=True))

    async def holding(self, need: int, work: Callable[[], ResultT], *, on_device: bool = False) -> ResultT:
        """Run work on the store with so many bytes of the host, and as many of the device; wait for them before.

        Work whose caller went away may be running already. It stops at its next checkpoint and frees its memory then.
        """
        cancellation, held = Cancellation(), ExitStack()
        budgets = [self.host, self.budget] if on_device and self.host is not self.budget else [self.host]

        def cancellable_work() -> ResultT:
            with cancellable(cancellation), self.noticed():
                return work()

        try:
            for budget in budgets:
                await budget.acquire(need)
                held.callback(budget.release, need)
            future = self._files.submit(cancellable_work)
        except BaseException as fault:
            held.close()
            if isinstance(fault, RuntimeError):  # the threads were stopped
                raise draining() from None
            raise
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(held.close))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise

    async def in_thread(
        self, work: Callable[[], ResultT], threads: ThreadPoolExecutor | None = None, watched: str | None = None
    ) -> ResultT:
        """Run work beside the event loop; it stops at its next checkpoint if the caller is cancelled.

        ``watched``: the name under which the watchdog watches it.
        """
        cancellation = Cancellation()

        def cancellable_work() -> ResultT:
            watching = nullcontext() if watched is None else self._watchdog.watching(watched, cancellation)
            with cancellable(cancellation), watching, self.noticed():
                return work()

        try:
            of_request = partial(copy_context().run, cancellable_work)  # log lines name the request
            return await asyncio.get_running_loop().run_in_executor(threads or self._files, of_request)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Notice a device that breaks outside of the lanes: the threads of the store copy parameters to it."""
        try:
            yield
        except Exception as fault:
            self.device.recover(fault)
            raise


def quickly_planned(module: Module | None, request: AttentionInputs) -> bool:
    """True if a request is planned about as fast as one without masks.

    The lengths are estimates from its tensors: binding checks them later.
    """
    if isinstance(request, GradientsRequest) and (request.check or request.directions or request.edits):
        return False
    masks = (
        module.config.spec.masks if module is not None else request.spec.masks if isinstance(request, RawInputs) else []
    )
    if not masks:
        return True
    if request.global_mask is not None:
        return False
    new = max(
        (array.shape[-2] for array in (request.query, request.key) if array is not None and array.ndim > 1), default=0
    )
    past = 0 if request.past_key is None or request.past_key.ndim < 2 else request.past_key.shape[-2]
    return is_quick(masks, new, new + past, 1 if request.offsets is None else request.offsets.size)

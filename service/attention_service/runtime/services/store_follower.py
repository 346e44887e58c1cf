"""The store's follower: modules that other servers on the same folder store, replace or delete are taken over."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final

from attention_service.core.cancellation import Cancellation, cancellable
from attention_service.modules.library import Library
from attention_service.runtime.scheduling.budget import Budget
from attention_service.runtime.scheduling.request_runner import RequestRunner

log = logging.getLogger(__name__)

FOLLOW_S: Final = 0.8
"""Seconds between two looks at the store."""


class StoreFollower:
    """Looks at the store again and again, on a thread of its own that wakes the event loop for changes alone."""

    def __init__(self, library: Library, budget: Budget, runner: RequestRunner) -> None:
        self._library = library
        self._budget = budget
        self._runner = runner
        self._cancellation = Cancellation()
        self._callers: SimpleQueue[asyncio.Future[None]] = SimpleQueue()
        """Callers that wait for a look that has not begun."""
        self._thread: threading.Thread | None = None
        self._admission: Future[None] | None = None
        """The wait for memory of a module that another server stored."""

    def start(self) -> None:
        """Follow the store from now on."""
        loop = asyncio.get_running_loop()
        self._library.admitted = partial(self._admitted, loop)
        self._thread = threading.Thread(target=self._follow, args=(loop,), name="attention-following", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Look no more."""
        self._cancellation.cancel()
        self._callers.put(asyncio.get_running_loop().create_future())  # the thread wakes
        if self._admission is not None:
            self._admission.cancel()

    async def stop(self) -> None:
        """Let the thread go."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def catch_up(self) -> None:
        """Take over what has changed in the store until now, in a look that those share who ask before it begins."""
        if self._thread is None or self._cancellation.cancelled:
            return
        seen = asyncio.get_running_loop().create_future()
        self._callers.put(seen)
        await seen

    def _follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look again and again."""
        while not (self._cancellation.cancelled or loop.is_closed()):
            callers, before = self._waiting(FOLLOW_S), self._library.resident_bytes
            try:
                with cancellable(self._cancellation), self._runner.noticed():
                    report(self._library.follow())
            except Exception:  # the next round may succeed
                if not self._cancellation.cancelled:
                    log.exception("the store could not be followed")
            if self._library.resident_bytes < before:
                _call(loop, self._budget.wake)
            if callers:
                _call(loop, partial(_release, callers))
        _call(loop, partial(_release, self._waiting(0)))

    def _waiting(self, seconds: float) -> "list[asyncio.Future[None]]":
        """Return those that wait for a look, after so many seconds if there are none before."""
        callers: list[asyncio.Future[None]] = []
        with suppress(Empty):
            callers.append(self._callers.get(timeout=seconds))
            while True:
                callers.append(self._callers.get_nowait())
        return callers

    @contextmanager
    def _admitted(self, loop: asyncio.AbstractEventLoop, need: int) -> Iterator[None]:
        """Hold memory for a module, in the thread that follows the store. It waits in turn with the requests."""
        if not need:
            yield
            return
        self._admission = asyncio.run_coroutine_threadsafe(self._budget.acquire(need), loop)
        if self._cancellation.cancelled:
            self._admission.cancel()
        self._admission.result()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(self._budget.release, need)


def report(problems: Iterable[str]) -> None:
    """Log the modules that could not be loaded."""
    for problem in problems:
        log.warning("a module was left out: %s", problem)


def _release(callers: Iterable["asyncio.Future[None]"]) -> None:
    for caller in callers:
        if not caller.done():
            caller.set_result(None)


def _call(loop: asyncio.AbstractEventLoop, work: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop was closed
        loop.call_soon_threadsafe(work)

"""The store's follower: modules that other servers on the same folder store, replace or delete are taken over."""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Final

from attention_service.modules.library import Library
from attention_service.runtime.scheduling.budget import Budget
from attention_service.runtime.scheduling.request_runner import RequestRunner

log = logging.getLogger(__name__)

FOLLOW_S: Final = 0.4
"""Seconds between two looks at the store."""


class StoreFollower:
    """Looks at the store again and again, on a thread of its own."""

    def __init__(self, library: Library, budget: Budget, runner: RequestRunner) -> None:
        self._library = library
        self._budget = budget
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="attention-following")
        self._looking: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None
        """A look that has not begun."""
        self._admission: Future[None] | None = None
        """The wait for memory of a module that another server stored."""

    def start(self) -> None:
        """Follow the store from now on."""
        self._library.admitted = partial(self._admitted, asyncio.get_running_loop())
        self._looking = asyncio.create_task(self._follow())

    def cancel(self) -> None:
        """Look no more."""
        for task in (self._looking, self._next):
            if task is not None:
                task.cancel()
        if self._admission is not None:
            self._admission.cancel()

    async def stop(self) -> None:
        """Let the thread go."""
        await asyncio.to_thread(partial(self._thread.shutdown, cancel_futures=True))

    async def catch_up(self) -> None:
        """Take over what has changed in the store until now, in a look that those share who ask before it begins."""
        if self._next is None:
            self._next = asyncio.create_task(self._look_next())
        await asyncio.shield(self._next)

    async def _look_next(self) -> None:
        async with self._turn:
            self._next = None
            await self._look()

    async def _follow(self) -> None:
        """Look again and again."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            await self._look()

    async def _look(self) -> None:
        """Take over what changed in the store."""
        before = self._library.resident_bytes
        try:
            report(await self._runner.in_thread(self._library.follow, self._thread))
        except Exception:  # the next round may succeed
            log.exception("the store could not be followed")
        if self._library.resident_bytes < before:
            self._budget.wake()

    @contextmanager
    def _admitted(self, loop: asyncio.AbstractEventLoop, need: int) -> Iterator[None]:
        """Hold memory for a module, in the thread that follows the store. It waits in turn with the requests."""
        if not need:
            yield
            return
        self._admission = asyncio.run_coroutine_threadsafe(self._budget.acquire(need), loop)
        self._admission.result()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(self._budget.release, need)


def report(problems: Iterable[str]) -> None:
    """Log the modules that could not be loaded."""
    for problem in problems:
        log.warning("a module was left out: %s", problem)

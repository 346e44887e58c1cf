"""The spare process: it has imported PyTorch and transformers, so that the next load is the reading of weights.

It is started when the server is idle, and becomes the process of the next model. Its memory counts in the budget, and
is the first to be freed when a request needs it.
"""

import asyncio
import logging
from typing import Final

import psutil

from attention_service.models.folders.model_catalogue import PROCESS_BYTES
from attention_service.models.server.model_environment import ModelEnvironment
from attention_service.models.server.model_memory import MemoryShare
from attention_service.models.server.worker_process import WorkerProcess

log = logging.getLogger(__name__)
_LOOK_S: Final = 0.5
"""Seconds between two looks, while the server is idle and has no spare process."""
_RARE: Final = 10
"""The same otherwise, as a multiple."""
_IDLE_LOOKS: Final = 3
"""Looks in a row that find the server idle, before a process is started."""
_PAUSE_S: Final = 60.0
"""Seconds without a spare process after one that gave way, or that died."""
_SHARE: Final = 0.25
"""The largest share of the free memory that it may take."""


class SpareProcess:
    """At most one process without a model. Used from the event loop only."""

    def __init__(self, environment: ModelEnvironment) -> None:
        self._environment = environment
        self._share = MemoryShare(environment.memory, self.give_way, first=True)
        """The memory that it holds of the budget; none of a GPU."""
        self._worker: WorkerProcess | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._endings: set[asyncio.Task[None]] = set()
        self._pause_until = 0.0

    def start(self) -> None:
        """Have a process ready from the next idle time on."""
        self._keeping = asyncio.create_task(self._keep())

    def take(self, need: int) -> WorkerProcess | None:
        """Hand over the process, with the memory that it held; None if there is none, or if ``need`` has to wait."""
        worker = self._worker
        if worker is None or not worker.is_alive or self._environment.budget.unclaimed + self._share.bytes < need:
            return None
        self._worker = None
        self._share.drop()
        return worker

    def give_way(self) -> None:
        """End, for its memory is needed."""
        if self._worker is not None:
            self._worker.kill()
            self._end_soon(self._worker)

    async def stop(self) -> None:
        """End it now, and start none any more."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        self.give_way()
        if self._endings:
            await asyncio.wait(self._endings)

    def _end_soon(self, worker: WorkerProcess) -> None:
        self._worker = None
        self._share.end()
        self._pause_until = asyncio.get_running_loop().time() + _PAUSE_S
        ending = asyncio.create_task(self._end(worker))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _end(self, worker: WorkerProcess) -> None:
        await worker.end()
        self._share.drop()

    async def _keep(self) -> None:
        """Look after it: start one in idle times, and notice the end of one."""
        looks, wait = 0, 1
        while True:
            await asyncio.sleep(wait * _LOOK_S)
            if self._worker is not None and not self._worker.is_alive:
                log.warning("the spare process for models ended by itself")
                self._end_soon(self._worker)
            looks = looks + 1 if self._may_start() else 0
            wait = 1 if looks else _RARE
            if looks >= _IDLE_LOOKS:
                looks = 0
                try:
                    await self._start()
                except OSError as fault:
                    log.warning("the spare process for models cannot be started: %s", fault)
                    self._share.drop()
                    self._pause_until = asyncio.get_running_loop().time() + _PAUSE_S

    def _may_start(self) -> bool:
        """True if there is none, nobody computes, and the memory is plenty."""
        budget = self._environment.budget
        if self._worker is not None or self._endings or asyncio.get_running_loop().time() < self._pause_until:
            return False
        if budget.in_flight or budget.waiting:
            return False
        free = psutil.virtual_memory().available
        return _SHARE * (free if self._environment.device.is_cuda else min(free, budget.unclaimed)) >= PROCESS_BYTES

    async def _start(self) -> None:
        is_cuda = self._environment.device.is_cuda
        with self._share.in_use():
            self._share.hold(0 if is_cuda else PROCESS_BYTES)
            self._worker = await WorkerProcess.start(PROCESS_BYTES, self._environment.stuck_s, watched=not is_cuda)
        await self._worker.send("warm")

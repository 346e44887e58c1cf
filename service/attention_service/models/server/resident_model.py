"""One model by its name: the life of its process, and the requests that wait for it or run in it."""

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from contextvars import Context
from typing import Any, Final, Literal

from attention_contract.errors import AttentionError, ModelEnded, Overloaded
from attention_contract.schemas.models import ModelInfo
from attention_service.models.folders.model_catalogue import PROCESS_BYTES, ModelFolder
from attention_service.models.server.model_environment import ModelEnvironment
from attention_service.models.server.model_memory import MemoryShare
from attention_service.models.server.model_question import Question
from attention_service.models.server.model_queue import ModelQueue, unexpected
from attention_service.models.server.spare_process import SpareProcess
from attention_service.models.server.worker_process import WorkerProcess
from attention_service.runtime.scheduling.passes import draining
from attention_service.runtime.scheduling.reservation import Reservation

log = logging.getLogger(__name__)
_RETRY_S: Final = 60
"""Seconds after which a load is worth another try, if other models hold its memory and answer requests."""
_SHARE: Final = 0.75
"""Share of the memory that a divided model may have; the rest is for its requests."""


class ResidentModel:
    """A named model. Its life is one task, which loads it, watches over its requests, and ends it."""

    def __init__(
        self,
        name: str,
        folder: ModelFolder,
        dtype: str | None,
        environment: ModelEnvironment,
        spare: SpareProcess | None = None,
        *,
        divided: bool = False,
        devices: Sequence[str] = (),
    ) -> None:
        """``spare``: a process that may be ready for it.

        ``divided``: keep on disk what is more than the memory, as transformers divides a model. ``devices``: those that
        it is spread over; by default it has the server's.
        """
        self.name = name
        self.folder = folder
        self.dtype = dtype or ("float32" if not environment.device.is_cuda else folder.form.facts.stored)
        self.progress: float | None = None
        """Share of the weights that are loaded, while it is being loaded."""
        self._share = MemoryShare(environment.memory, self._give_way, self._give_back, name=name)
        """The memory that it holds besides what is in flight: an estimate, or what a GPU holds."""
        self._divided = divided
        self.devices = tuple(devices) or (environment.device.place,)
        self._environment = environment
        self._prefix_bytes = environment.prefixes.of(folder.tensor_bytes) if folder.generates else 0
        self._spare = spare
        self._queue = ModelQueue(environment, self._share, self.info, self._stop_if_left)
        self._changed = asyncio.Event()
        """Set when it may have to end, but for a lack of requests."""
        self._life: asyncio.Task[None] | None = None
        self._worker: WorkerProcess | None = None
        self._facts: dict[str, Any] | None = None
        """Its facts, by its process, while it is resident."""
        self._leaves = False
        """True if it ends as soon as nobody waits."""

    # ── as others see it ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def state(self) -> Literal["idle", "loading", "resident", "stuck"]:
        """Its state to a caller. A model whose process is ending is idle: the next request loads it."""
        if self.stands_s:
            return "stuck"
        return "resident" if self._facts is not None else "idle" if self.progress is None else "loading"

    @property
    def adapters(self) -> Collection[str]:
        """The names of the adapters that its process has."""
        return self._share.adapters.keys()

    @property
    def stands_s(self) -> float:
        """Seconds for which its process stands still; 0 if these are few."""
        return 0.0 if self._worker is None else self._worker.stands_s

    @property
    def is_alive(self) -> bool:
        """True until its process has ended and its memory is free."""
        return self._life is not None

    def waiting(self, caller: str | None = None) -> int:
        """The number of requests that wait, of a caller or of all."""
        waiting = self._queue.waiting
        return waiting.size if caller is None else waiting.count(caller)

    def info(self) -> ModelInfo:
        """Describe the model as it is now."""
        described = self.folder.info(self.name, self.dtype).model_copy(update={"waiting": self.waiting()})
        if self._facts is None:
            described = described.model_copy(update={"state": self.state, "progress": self.progress})
        else:
            own = {"id", "created", "checkpoint", "bytes"}
            facts = {name: value for name, value in self._facts.items() if name not in own}
            now: dict[str, Any] = {"state": self.state, "progress": None, "bytes": self._share.bytes}
            now |= {"running": self._queue.running, "devices": [*self.devices] if len(self.devices) > 1 else []}
            facts["left_out"] = [*dict.fromkeys([*described.left_out, *facts.get("left_out", ())])]
            described = ModelInfo(**described.model_dump(exclude={*now, *facts}), **facts | now)
        return described

    async def ask(self, question: Question) -> None:
        """Wait for the answer to a request, which stops soon if the caller is cancelled.

        Raises what the model does, ModelEnded if its process ends meanwhile, and what the budget does.
        """
        with self._share.in_use():
            self._queue.add(question)
            if self._life is None:
                self._begin()
            try:
                await question.done
            finally:
                self._queue.discard(question)
                self._stop_unwanted_load()

    def leave(self) -> None:
        """End as soon as nobody waits, also in the middle of loading."""
        self._leaves = True
        self._changed.set()
        self._stop_unwanted_load()

    def _stop_unwanted_load(self) -> None:
        if self._leaves and self._life is not None and self.progress is not None and not self.waiting():
            self._life.cancel()

    def _stop_if_left(self) -> None:
        if self._leaves:
            self._changed.set()

    async def left(self) -> None:
        """Wait for its end."""
        if self._life is not None:
            await asyncio.wait([self._life])

    async def stop(self) -> None:
        """End now."""
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait([self._life])

    # ── its life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        self.progress = 0.0
        self._life = asyncio.create_task(self._live(), context=Context())
        self._life.add_done_callback(self._ended)

    async def _live(self) -> None:
        while self.waiting():
            await self._live_once()

    def _ended(self, life: "asyncio.Task[None]") -> None:
        """Answer those who still wait; a task that was cancelled before its first step has answered nobody."""
        self._life = self.progress = None
        self._leaves = False
        if life.cancelled():
            self._queue.fail_all(draining())
        elif (fault := life.exception()) is not None:
            log.error("a model could not be served", exc_info=fault)
            self._queue.fail_all(unexpected())
        elif self.waiting():  # they came in the turn in which it ended
            self._begin()

    async def _live_once(self) -> None:
        """Load the model, and answer until nobody asks any more or its process ends."""
        worker = None
        try:
            worker = await self._load()
            await self._serve(worker)
        except AttentionError as fault:  # its process has ended, or never came to answer
            if self._facts is None:
                self._environment.counts["failed_loads"] += 1
                self._queue.fail_all(fault)
            else:
                self._environment.counts["deaths" if isinstance(fault, ModelEnded) else "outgrown"] += 1
        finally:
            self._facts = None
            self._share.end()
            if worker is not None:
                await worker.end()
            self._worker = None
            self._share.drop()

    async def _load(self) -> WorkerProcess:
        """Start a process and have it load the model, with the memory for both."""
        environment, folder, budget = self._environment, self.folder, self._environment.budget
        self.progress = 0.0
        devices, apart = len(self.devices), environment.device.is_cuda  # the budget is that of one GPU
        need = folder.loading_bytes(self.dtype, devices, apart=apart) + self._prefix_bytes
        most = int(budget.capacity * _SHARE)
        device_bytes = max(most - PROCESS_BYTES, 0) if self._divided and need > most else None
        need = need if device_bytes is None else most
        held = Reservation(budget, self._queue.waiting.first().caller)
        worker = None if self._spare is None or devices > 1 else self._spare.take(need)
        try:
            await self._take(held, need)
            if environment.device.is_cuda:
                await environment.give_back_cached(need)
            if worker is None:
                watched = not environment.device.is_cuda
                worker = await WorkerProcess.start(need, environment.stuck_s, watched=watched, devices=devices)
            self._worker, worker.limit, worker.memories.on_kept = worker, need, self._share.keep
            facts = {
                "name": self.name,
                "folder": str(folder.folder),
                "dtype": self.dtype,
                "device": self.devices[0],
                "devices": self.devices,
                "threads": max(environment.device.threads // devices, 1),
                "free_bytes": device_bytes,
                "prefix_bytes": self._prefix_bytes,
                "memories": worker.memories.files,
            }
            self._facts = await worker.load(facts, self._note_progress)
        except BaseException:
            if worker is not None:
                await worker.end()
            raise
        else:
            resident = folder.resident_bytes(self.dtype, devices, apart=apart) + self._prefix_bytes
            worker.limit = min(resident, need) + (1 if apart else devices) * worker.unforeseen_bytes
            reserved = self._facts.pop("held_bytes")
            self._share.hold(worker.limit if reserved is None else PROCESS_BYTES + reserved)
        finally:
            self.progress = None
            held.give_back()
        environment.counts["loads"] += 1
        now = time.monotonic()
        for waiting in self._queue.waiting:
            waiting.loaded = now
        return worker

    async def _take(self, held: Reservation, need: int) -> None:
        """Take the memory of the load, for which idle models end. Raises what the budget does.

        If models that answer requests hold it, the refusal names them, and tells clients to come back much later.
        """
        budget = self._environment.budget
        try:
            budget.check(need, "loading the model takes an estimated {need} bytes", "Load a smaller one")
            await held.take(need)
        except Overloaded as fault:
            if not (holders := self._environment.memory.held_by):
                raise
            why = fault.detail.removesuffix("; try again in a moment")
            refusal = Overloaded(f"{why}: {holders}. Ask again when one of them is idle, or unload one", **fault.facts)
            refusal.retry_after = _RETRY_S
            raise refusal from None

    def _note_progress(self, share: float) -> None:
        self.progress = share

    async def _serve(self, worker: WorkerProcess) -> None:
        """Have the process answer until nobody asks for a while, or until it gives way. Raises what ended it."""
        self._share.last_use = time.monotonic()
        worker.ended.add_done_callback(lambda _: self._changed.set())
        queue, idle_s = self._queue, self._environment.idle_s
        queue.open(worker)
        try:
            while worker.is_alive:
                rest = idle_s
                if not queue.running:
                    if self._share.ends or self._leaves:
                        return
                    rest = self._share.last_use + idle_s - time.monotonic()
                    if rest <= 0:
                        self._environment.counts["idle_ends"] += 1
                        return
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(rest):
                        await self._changed.wait()
        except asyncio.CancelledError:
            queue.cancel()
            raise
        finally:
            await queue.close()
        raise await worker.fault()

    # ── its memory ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _give_way(self) -> None:
        """End, for its memory is needed."""
        self._environment.counts["evictions"] += 1
        self._changed.set()

    def _give_back(self) -> None:
        """Free the memory that is kept for the next replies."""
        if self._worker is not None:
            self._worker.memories.give_back()

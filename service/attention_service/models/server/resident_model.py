"""One model by its name: its process while it is resident, and the requests that wait for their turn."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from attention_contract.errors import AttentionError, InternalError, ModelEnded, from_problem
from attention_contract.schemas.models import ModelInfo
from attention_service.models.model_catalogue import PROCESS_BYTES, ModelFolder
from attention_service.models.reply_memory import ReplyMemory, pieces_of_body
from attention_service.models.server.model_environment import ModelEnvironment
from attention_service.models.server.model_memory import MemoryShare
from attention_service.models.server.spare_process import SpareProcess
from attention_service.models.server.worker_process import WorkerProcess
from attention_service.models.worker_messages import Message, Piece
from attention_service.runtime.callers import caller
from attention_service.runtime.scheduling.fair_queue import FairQueue
from attention_service.runtime.scheduling.passes import draining
from attention_service.runtime.scheduling.reservation import Reservation

log = logging.getLogger(__name__)
_STOP_S: Final = 5.0
"""Seconds that a process has to stop work that nobody waits for, before it is ended."""
_READING: Final = 6
"""Memory that reading a request takes, of its size: the message, its JSON twice, and images as text and as files."""
_SHARE: Final = 0.75
"""Share of the memory that a divided model may have; the rest is for its requests."""


@dataclass(eq=False)
class Question:
    """One request to a model; without an operation, for its being resident."""

    operation: str | None = None
    body: Sequence[Piece] = ()
    on_event: Callable[[memoryview], None] = lambda _: None
    """Called with each event of a generation. Raises AttentionError if there is no room for it."""
    deadline: float | None = None
    """The time, of ``time.monotonic``, at which its caller leaves; None for never."""
    done: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    caller: str = field(default_factory=lambda: caller.get().name)
    came: float = field(default_factory=time.monotonic)
    began: float = 0.0
    loaded: float = 0.0
    """Time at which the model had been loaded, if the request waited for that; else 0."""
    peak_bytes: int = 0
    """Bytes that it was admitted for."""
    memory: ReplyMemory | None = None
    """The memory in which its reply is made; None if the reply goes through the pipe."""
    reply: Sequence[memoryview] | None = None
    """The pieces of its safetensors file."""
    last: memoryview | None = None
    """The last event of a generation, which ``on_event`` got too."""
    recording: memoryview | None = None
    info: ModelInfo | None = None
    """The answer to a question without an operation: the model as it was then."""
    fault: AttentionError | None = None
    """The answer, if it is an error; given once the process is ready for the next request."""

    def fail(self, fault: AttentionError) -> None:
        """Answer with an error, unless the caller has left or the answer is there."""
        if not self.done.done():
            self.done.set_exception(fault)


class ResidentModel:
    """A named model. Its life is one task, which loads it, answers request after request, and ends it."""

    def __init__(
        self,
        name: str,
        folder: ModelFolder,
        dtype: str | None,
        environment: ModelEnvironment,
        spare: SpareProcess | None = None,
        *,
        divided: bool = False,
    ) -> None:
        """``spare``: a process that may be ready for it.

        ``divided``: keep on disk what is more than the memory, as transformers divides a model.
        """
        self.name = name
        self.folder = folder
        self.dtype = dtype or ("float32" if not environment.device.is_cuda else folder.stored)
        self.progress: float | None = None
        """Share of the weights that are loaded, while it is being loaded."""
        self._share = MemoryShare(environment.memory, self._give_way, self._give_back)
        """The memory that it holds besides what is in flight: an estimate, or what a GPU holds."""
        self._divided = divided
        self._environment = environment
        self._spare = spare
        self._waiting: FairQueue[Question] = FairQueue()
        self._came = asyncio.Event()
        self._life: asyncio.Task[None] | None = None
        self._worker: WorkerProcess | None = None
        self._facts: dict[str, Any] | None = None
        """Its facts, by its process, while it is resident."""
        self._running: Question | None = None
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
    def stands_s(self) -> float:
        """Seconds for which its process stands still; 0 if these are few."""
        return 0.0 if self._worker is None else self._worker.stands_s

    @property
    def is_alive(self) -> bool:
        """True until its process has ended and its memory is free."""
        return self._life is not None

    def waiting(self, caller: str | None = None) -> int:
        """The number of requests that wait, of a caller or of all."""
        return self._waiting.size if caller is None else self._waiting.count(caller)

    def info(self) -> ModelInfo:
        """Describe the model as it is now."""
        told = self.folder.info(self.name, self.dtype)
        if self._facts is None:
            told = told.model_copy(update={"state": self.state, "progress": self.progress})
        else:
            own = {"id", "created", "checkpoint", "bytes"}
            facts = {name: value for name, value in self._facts.items() if name not in own}
            now = {"state": self.state, "progress": None, "bytes": self._share.bytes}
            told = ModelInfo(**told.model_dump(exclude={*now, *facts}), **facts | now)
        return told

    async def ask(self, question: Question) -> None:
        """Wait for the answer to a request, which stops soon if the caller is cancelled.

        Raises what the model does, ModelEnded if its process ends meanwhile, and what the budget does.
        """
        with self._share.in_use():
            self._waiting.add(question)
            if self._life is None:
                self._begin()
            self._came.set()
            try:
                await question.done
            finally:
                if question in self._waiting:
                    self._waiting.remove(question)
                    self._stop_unwanted_load()

    def leave(self) -> None:
        """End as soon as nobody waits, also in the middle of loading."""
        self._leaves = True
        self._came.set()
        self._stop_unwanted_load()

    def _stop_unwanted_load(self) -> None:
        if self._leaves and self._life is not None and self.progress is not None and not self._waiting.size:
            self._life.cancel()

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
        while self._waiting.size:
            await self._live_once()

    def _ended(self, life: "asyncio.Task[None]") -> None:
        """Answer those who still wait; a task that was cancelled before its first step has answered nobody."""
        self._life = self.progress = None
        if life.cancelled():
            self._fail_all(draining())
        elif (fault := life.exception()) is not None:
            log.error("a model could not be served", exc_info=fault)
            self._fail_all(_unexpected())
        elif self._waiting.size:  # they came in the turn in which it ended
            self._begin()

    async def _live_once(self) -> None:
        """Load the model, and answer until nobody asks any more or its process ends."""
        worker = None
        try:
            worker = await self._load()
            while (question := await self._next()) is not None:
                await self._answer(worker, question)
        except AttentionError as fault:  # its process has ended, or never came to answer
            if self._facts is None:
                self._environment.counts["failed_loads"] += 1
                self._fail_all(fault)
            else:
                self._environment.counts["deaths" if isinstance(fault, ModelEnded) else "outgrown"] += 1
        finally:
            self._facts, self._leaves = None, False
            self._share.end()
            if worker is not None:
                await worker.end()
            self._worker = None
            self._share.drop()

    async def _load(self) -> WorkerProcess:
        """Start a process and have it load the model, with the memory for both."""
        environment, folder = self._environment, self.folder
        self.progress = 0.0
        need, most = folder.loading_bytes(self.dtype), int(environment.budget.capacity * _SHARE)
        room = max(most - PROCESS_BYTES, 0) if self._divided and need > most else None
        need = need if room is None else most
        held = Reservation(environment.budget, self._waiting.first().caller)
        worker = None if self._spare is None else self._spare.take(need)
        try:
            await self._reserve(held, need, "loading the model takes an estimated {need} bytes", "Load a smaller one")
            if worker is None:
                worker = await WorkerProcess.start(need, environment.stuck_s, watched=not environment.device.is_cuda)
            self._worker, worker.limit, worker.memories.on_kept = worker, need, self._share.keep
            facts = {
                "name": self.name,
                "folder": str(folder.folder),
                "dtype": self.dtype,
                "device": environment.device.place,
                "threads": environment.device.threads,
                "room": room,
                "memories": worker.memories.files,
            }
            await worker.send("load", facts)
            while (message := await worker.receive()).kind != "loaded":
                if message.kind == "problem":
                    raise from_problem(message.facts["status"], message.facts)
                self.progress = message.facts["share"]
        except BaseException:
            if worker is not None:
                await worker.end()
            raise
        else:
            worker.limit = min(folder.resident_bytes(self.dtype), need) + worker.unforeseen_bytes
            self._share.hold(worker.limit)
            self._hold(message.facts.pop("held_bytes"))
            self._facts = message.facts
        finally:
            self.progress = None
            held.give_back()
        environment.counts["loads"] += 1
        now = time.monotonic()
        for each in self._waiting:
            each.loaded = now
        return worker

    async def _next(self) -> Question | None:
        """Wait for the next request; None once the model is to end."""
        while not self._waiting.size and not self._share.ends:
            self._came.clear()
            if self._leaves:
                return None
            try:
                async with asyncio.timeout(self._environment.idle_s):
                    await self._came.wait()
            except TimeoutError:
                self._environment.counts["idle_ends"] += 1
                return None
        if self._share.ends:  # it gave way, and those who came since wait for the next process
            return None
        question = self._waiting.first()
        self._waiting.begin(question, 1.0)
        return question

    async def _answer(self, worker: WorkerProcess, question: Question) -> None:
        """Have the process answer one request, and wait until it is ready for the next."""
        if question.done.done():
            return
        self._running, question.began = question, time.monotonic()
        watch = asyncio.create_task(_stop_with(question, worker))
        held = Reservation(self._environment.budget, question.caller)
        taken = None
        try:
            if question.operation is not None:
                taken = worker.memories.take()
                question.memory = None if taken is None else taken[1]
                worker.limit = self._share.own + _READING * sum(map(len, question.body))
                facts = {
                    "request": id(question),
                    "operation": question.operation,
                    "room": self._environment.budget.capacity,
                    "memory": None if taken is None else taken[0],
                    "deadline": question.deadline,
                }
                await worker.send("ask", facts, question.body)
                while (message := await worker.receive()).kind != "done":
                    await self._take(message, question, worker, held)
                self._hold(message.facts["held_bytes"])
            if question.fault is not None:
                question.fail(question.fault)
            elif not question.done.done():
                if question.operation is None:
                    question.info = self.info()
                question.done.set_result(None)
        except AttentionError as fault:
            question.fail(fault)
            raise
        except asyncio.CancelledError:
            question.fail(draining())
            raise
        except Exception:
            question.fail(_unexpected())
            raise
        finally:
            watch.cancel()
            held.give_back()
            self._running = None
            worker.limit = self._share.own
            if taken is not None:
                if question.reply is None:
                    taken[1].forget()
                worker.memories.leave(taken[1])

    # ── its memory ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _give_way(self) -> None:
        """End, for its memory is needed."""
        self._environment.counts["evictions"] += 1
        self._came.set()

    def _give_back(self) -> None:
        """Free the memory that is kept for the next replies."""
        if self._worker is not None:
            self._worker.memories.give_back()

    def _hold(self, reserved: int | None) -> None:
        """Count what the model holds on a GPU in place of the estimate."""
        if reserved is not None:
            self._share.hold(PROCESS_BYTES + reserved)

    async def _take(self, message: Message, question: Question, worker: WorkerProcess, held: Reservation) -> None:
        """Take one message about a request."""
        match message.kind:
            case "need":
                worker.limit -= question.peak_bytes
                admitted = await self._admit(question, held, message.facts["bytes"])
                worker.limit += question.peak_bytes
                await worker.send("go" if admitted else "cancel", {"request": id(question)})
            case "event":
                await self._pass_on(message.body, question, worker)
            case "last":
                question.last = message.body
                self._environment.generated_tokens += message.facts["tokens"]
                await self._pass_on(message.body, question, worker)
            case "pass":
                pass
            case "recording":
                question.recording = message.body
            case "reply":
                places, memory = message.facts["places"], question.memory
                question.reply = (
                    pieces_of_body(places, message.body) if memory is None else memory.pieces(places, message.body)
                )
            case _:
                # The cancellation of a refused request is answered with a problem, too.
                question.fault = question.fault or from_problem(message.facts["status"], message.facts)

    async def _pass_on(self, event: memoryview, question: Question, worker: WorkerProcess) -> None:
        """Give an event to the caller, and stop the work if there is no room for it."""
        if not event or question.fault is not None or question.done.done():
            return
        try:
            question.on_event(event)
        except AttentionError as fault:
            question.fault = fault
            await worker.send("cancel", {"request": id(question)})

    async def _admit(self, question: Question, held: Reservation, need: int) -> bool:
        """Take the memory of a request. False if it is refused, or if its caller leaves meanwhile."""
        what, advice = (
            "the request takes an estimated {need} bytes in the model",
            "Ask for fewer layers, heads or tokens",
        )
        taking = asyncio.create_task(self._reserve(held, need, what, f"{advice} at a time"))
        try:
            await asyncio.wait({taking, question.done}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            taking.cancel()
            await asyncio.wait({taking})
        if taking.cancelled():
            return False
        try:
            taking.result()
        except AttentionError as fault:
            question.fault = fault
            return False
        if question.done.done():  # in the same turn
            return False
        question.peak_bytes = need
        if question.memory is not None:
            question.memory.cut(need)
        return True

    async def _reserve(self, held: Reservation, need: int, what: str, advice: str) -> None:
        """Take memory of the budget as a caller who waits for it in turn. Raises what the budget does."""
        environment = self._environment
        environment.budget.check(need, what, advice, own=self._share.own)
        await held.take(need)
        if environment.device.is_cuda:  # PyTorch keeps freed memory for this process, where the model's cannot take it
            await asyncio.to_thread(environment.device.give_back_cached, need)

    def _fail_all(self, fault: AttentionError) -> None:
        for question in list(self._waiting):
            self._waiting.remove(question)
            question.fail(fault)


def _unexpected() -> AttentionError:
    return InternalError("the model could not be served; the server's log has the cause")


async def _stop_with(question: Question, worker: WorkerProcess) -> None:
    """Stop the work of a request when its caller leaves, and the process if it does not stop."""
    await asyncio.wait([question.done])
    if question.done.cancelled():
        await worker.send("cancel", {"request": id(question)})
        await asyncio.sleep(_STOP_S)
        worker.kill()

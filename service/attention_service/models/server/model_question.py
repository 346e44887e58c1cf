"""One request on its way to a model: from the queue, through the process, to its answer."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from attention_contract.errors import AttentionError, from_problem
from attention_contract.schemas.models import ModelInfo
from attention_contract.tensors import Encoding
from attention_contract.wire import JSON, SAFETENSORS
from attention_service.models.folders.model_catalogue import PROCESS_BYTES
from attention_service.models.reply_memory import ReplyMemory, pieces_of_body
from attention_service.models.server.exchange import Exchange
from attention_service.models.server.model_environment import ModelEnvironment
from attention_service.models.server.model_memory import MemoryShare
from attention_service.models.server.worker_process import WorkerProcess
from attention_service.models.worker_messages import Piece, WorkerMessage
from attention_service.runtime.callers import caller
from attention_service.runtime.scheduling.reservation import Reservation
from attention_service.runtime.services.recording_service import owner_of_recordings

_READING: Final = 6
"""Memory that reading a request takes, of its size: the message, its JSON twice, and images as text and as files."""
_WHAT: Final = "the request takes an estimated {need} bytes in the model"
_ADVICE: Final = "Ask for fewer layers, heads or tokens at a time"


class WrittenReply(NamedTuple):
    """A reply as the process of its model wrote it."""

    pieces: Sequence[memoryview]
    media_type: str
    """The form of the pieces: that which was asked for, or safetensors for a JSON text of many numbers."""


@dataclass(eq=False)
class Question:
    """One request to a model; without an operation, for its being resident."""

    operation: str | None = None
    body: Sequence[Piece] = ()
    form: str = SAFETENSORS
    """The media type of the reply."""
    encoding: Encoding = "list"
    """The form of tensors in a JSON reply."""
    on_event: Callable[[memoryview], None] | None = None
    """Called with each event of a generation. Raises AttentionError if there is no room for it."""
    adapter: dict[str, str] | None = None
    """The name and the folder of the adapter that is to answer; None for the model by itself."""
    lens: str | None = None
    """The file of the lens that it reads by."""
    probes: Mapping[str, str] = field(default_factory=dict)
    """The files of the probes that watch, by id."""
    vectors: Mapping[str, str] = field(default_factory=dict)
    """The files of the steering vectors that its edits add, by id."""
    alone: bool = False
    """True if it is to get the same bits every time."""
    deadline: float | None = None
    """The time, of ``time.monotonic``, at which its caller leaves; None for never."""
    cost: float = 1.0
    """Its share of the model's time, where a question counts 1."""
    done: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    caller: str = field(default_factory=lambda: caller.get().name)
    owner: str | None = field(default_factory=owner_of_recordings)
    """The owner of the recording that it makes."""
    came: float = field(default_factory=time.monotonic)
    loaded: float = 0.0
    """Time at which the model had been loaded, if the request waited for that; else 0."""
    began: float = 0.0
    """Time at which its memory was admitted, so that the process runs it; else 0."""
    is_repeated: bool = False
    """True if a process ended before it ran this request, which another one is asked again."""
    peak_bytes: int = 0
    """Bytes that it was admitted for."""
    reply: WrittenReply | None = None
    compute_ms: float = 0.0
    """Milliseconds in the process; 0 if it told none."""
    time: dict[str, Any] | None = None
    """Its time beside the prediction, if it told that."""
    last: memoryview | None = None
    """The last event of a generation, which ``on_event`` got too."""
    recording: memoryview | None = None
    info: ModelInfo | None = None
    """The answer to a question without an operation: the model as it was then."""

    @property
    def reply_facts(self) -> dict[str, Any]:
        """The facts of a reply that the process does not know."""
        loaded = max(self.loaded, self.came)
        return {
            "queue_ms": (self.began - loaded) * 1e3, "load_ms": (loaded - self.came) * 1e3, "owner": self.owner
        }  # fmt: skip

    def succeed(self) -> None:
        """Tell the caller that the answer is there, unless he has left."""
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, fault: AttentionError) -> None:
        """Answer with an error, unless the caller has left or the answer is there."""
        if not self.done.done():
            self.done.set_exception(fault)


class QuestionRun:
    """A question that a process answers: asked, priced, admitted, run, and done."""

    def __init__(
        self, question: Question, worker: WorkerProcess, environment: ModelEnvironment, share: MemoryShare
    ) -> None:
        self._question = question
        self._worker = worker
        self._environment = environment
        self._share = share
        self._held = Reservation(environment.budget, question.caller)
        self._memory: ReplyMemory | None = None
        """The memory in which the reply is made; None if it goes through the pipe."""
        self._fault: AttentionError | None = None
        """The answer, if it is an error; given once the process is done with the request."""
        self._stopping: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Have the process answer, also if the caller leaves meanwhile: then it is to stop.

        Raises OverBudget and ModelEnded if the process ends.
        """
        question = self._question
        with self._share.in_use(), self._worker.exchange() as exchange:

            def left(_: object) -> None:
                self._stopping = asyncio.create_task(self._stop(exchange))

            question.done.add_done_callback(left)
            try:
                number = self._take_memory()
                exchange.allow(self._reading_bytes)
                facts = {
                    "operation": question.operation,
                    "caller": question.caller,
                    "free_bytes": self._environment.budget.capacity,
                    "memory": number,
                    "deadline": question.deadline,
                    "adapter": question.adapter,
                    "lens": question.lens,
                    "probes": question.probes,
                    "vectors": question.vectors,
                    "alone": question.alone,
                    "form": question.form,
                    "encoding": question.encoding,
                    "reader": "" if self._environment.prefixes.shared else question.caller,
                }
                await exchange.ask(facts, question.body)
                while (message := await exchange.receive()).kind != "done":
                    await self._take(message, exchange)
            finally:
                question.done.remove_done_callback(left)
                if self._stopping is not None:
                    self._stopping.cancel()
                self._held.give_back()
                self._leave_memory()
            adapters = message.facts["adapter_bytes"]
            self._worker.limit += sum(adapters.values()) - sum(self._share.adapters.values())
            self._share.hold_adapters(adapters)
            if (reserved := message.facts["held_bytes"]) is not None:
                self._share.hold(PROCESS_BYTES + reserved)
        if self._fault is None:
            question.succeed()
        else:
            question.fail(self._fault)

    async def _stop(self, exchange: Exchange) -> None:
        """Stop the work that nobody waits for, and the process if it falls silent over it."""
        await exchange.cancel()
        await self._worker.kill_if_silent()

    @property
    def _reading_bytes(self) -> int:
        return _READING * sum(map(len, self._question.body))

    def _take_memory(self) -> int | None:
        """Take a memory for the reply, and return its number; None for a generation, or if none is free."""
        if self._question.on_event is not None or (taken := self._worker.memories.take()) is None:
            return None
        number, self._memory = taken
        return number

    def _leave_memory(self) -> None:
        if self._memory is not None:
            if self._question.reply is None or self._question.reply.media_type == JSON:
                self._memory.forget()
            self._worker.memories.leave(self._memory)

    async def _take(self, message: WorkerMessage, exchange: Exchange) -> None:
        """Take one message."""
        question = self._question
        match message.kind:
            case "need":
                if await self._admit(message.facts["bytes"], exchange):
                    await exchange.go(question.reply_facts)
                else:
                    await exchange.cancel()
            case "event":
                await self._pass_on(message.body, exchange)
            case "last":
                question.last = message.body
                self._environment.generated_tokens += message.facts["tokens"]
                question.time = message.facts.get("time")
                await self._pass_on(message.body, exchange)
            case "recording":
                question.recording = message.body
            case "reply":
                places, memory, body = message.facts["places"], self._memory, message.body
                pieces = pieces_of_body(places, body) if memory is None else memory.pieces(places, body)
                question.reply = WrittenReply(pieces, message.facts["media_type"])
                question.compute_ms = message.facts["compute_ms"]
                question.time = message.facts.get("time")
            case _:
                # The cancellation of a refused request is answered with a problem, too.
                self._fault = self._fault or from_problem(message.facts["status"], message.facts)

    async def _pass_on(self, event: memoryview, exchange: Exchange) -> None:
        """Give an event to the caller, and stop the work if there is no room for it."""
        question = self._question
        if not event or self._fault is not None or question.done.done() or question.on_event is None:
            return
        try:
            question.on_event(event)
        except AttentionError as fault:
            self._fault = fault
            await exchange.cancel()

    async def _admit(self, need: int, exchange: Exchange) -> bool:
        """Take the memory of the request. False if it is refused, or nobody waits for it any more."""
        question, budget = self._question, self._environment.budget
        try:
            budget.check(need, _WHAT, _ADVICE, own=self._share.own)
            if not self._held.take_now(need) and not await self._wait_for(need):
                return False
        except AttentionError as fault:
            self._fault = fault
            return False
        if self._environment.device.is_cuda:
            await self._environment.give_back_cached(need)
        if question.done.done():
            return False
        question.began, question.peak_bytes = question.began or time.monotonic(), need
        exchange.allow(self._reading_bytes + need)
        if self._memory is not None:
            self._memory.cut(need)
        return True

    async def _wait_for(self, need: int) -> bool:
        """Wait for memory. False if the caller left or the process ended first. Raises what the budget does."""
        taking = asyncio.create_task(self._held.take(need))
        try:
            await asyncio.wait({taking, self._question.done, self._worker.ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            taking.cancel()
            await asyncio.wait({taking})
        if taking.cancelled():
            return False
        taking.result()
        return True

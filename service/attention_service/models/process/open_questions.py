"""The requests of a process that have no answer yet, and what the server is told of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from attention_contract.schemas.prompts import ModelRan
from attention_contract.tensor_files import to_safetensors
from attention_service.core.cancellation import Abandoned, cancellable
from attention_service.models.process.asked_question import AskedQuestion
from attention_service.models.process.process_pipes import ProcessPipes, problem_of
from attention_service.models.process.reply_writing import lines_of, written
from attention_service.models.process.served import Answer, PricedRun, Served
from attention_service.models.reply_memory import ReplySpace
from attention_service.models.worker_messages import WorkerMessage
from attention_service.modules.recording_files import content_id
from attention_service.runtime.device.freed_memory import MUCH, give_back_freed_memory, private_bytes

_LONG_S: Final = 1.0
"""Seconds that a part may take without the server being told before."""


class OpenQuestions:
    """The questions of a process by their numbers, and their messages to the server."""

    def __init__(self, pipes: ProcessPipes, model: Served, memories: Sequence[ReplySpace]) -> None:
        """``memories``: those in which replies are made."""
        self.pipes, self.model, self._memories = pipes, model, memories
        self.discards: list[Callable[[AskedQuestion], None]] = []
        """Functions that take a question with its answer out of all places in which it may wait."""
        self._questions: dict[int, AskedQuestion] = {}
        self._least = held_after_giving_back()
        """The bytes of the process when it last gave memory back."""

    def __iter__(self) -> Iterator[AskedQuestion]:
        """All questions that have no answer."""
        return iter([*self._questions.values()])

    def get(self, number: int) -> AskedQuestion | None:
        """The question of this number; None once it has its answer."""
        return self._questions.get(number)

    def open(self, message: WorkerMessage) -> AskedQuestion:
        """The question that a message asks."""
        facts, number = message.facts, message.facts["request"]
        space = ReplySpace(None) if facts["memory"] is None else self._memories[facts["memory"]]
        question = AskedQuestion(
            number, facts["caller"], self.pipes.cancellation(number), space, facts["form"], facts["encoding"],
            alone=facts.get("alone", False),
        )  # fmt: skip
        self._questions[number] = question
        return question

    @contextmanager
    def guarded(self, question: AskedQuestion) -> Iterator[None]:
        """Let the request of a block be cancelled, and answer it if the block fails."""
        try:
            with cancellable(question.cancellation):
                yield
        except Exception as fault:
            self.fail(question, fault)

    def price(self, question: AskedQuestion, work: PricedRun) -> None:
        """Tell the server what the next work of a request needs, which it is to admit."""
        question.work, question.need = work, max(question.need, work.needed_bytes)
        self.pipes.send("need", {"bytes": question.need}, request=question.number)

    def announce(self, seconds: float) -> None:
        """Tell the server that nothing may come for so long."""
        if seconds > _LONG_S:
            self.pipes.send("pass", {"seconds": seconds})

    def emit(self, number: int, event: bytes) -> None:
        """Send an event of a request."""
        self.pipes.send("event", body=[event], request=number)

    def end(self, question: AskedQuestion, answer: Answer) -> None:
        """Send an answer, written as the caller gets it."""
        number, last, reply, more = question.number, answer.last, answer.reply, dict[str, Any]()
        told = {"time": None if answer.time is None else answer.time.facts()}
        if answer.recording is not None:
            self.pipes.send("recording", body=to_safetensors(answer.recording, "recording"), request=number)
            more["recording"] = content_id(answer.recording, question.owner)
        if last is not None:
            last = [*last[:-1], *(times | more for times in last[-1:])]
            self.pipes.send("last", {"tokens": answer.tokens} | told, [lines_of(last)], request=number)
        if reply is not None:
            compute_ms = 0.0
            if isinstance(of_run := getattr(reply, "ran", None), ModelRan):
                compute_ms = of_run.compute_ms
                ran = of_run.model_copy(update={**question.waits, "peak_bytes": question.need})
                reply = reply.model_copy(update={"ran": ran, **more})
            media_type, pieces = answer.written or written(reply, question.form, question.encoding)
            places, inline = question.memory.leave(pieces)
            facts = {"places": places, "media_type": media_type, "compute_ms": compute_ms} | told
            self.pipes.send("reply", facts, inline, request=number)
        self._forget(question)

    def leave(self, question: AskedQuestion) -> None:
        """Stop a request that nobody waits for any more."""
        self.fail(question, Abandoned())

    def fail(self, question: AskedQuestion, fault: Exception) -> None:
        """Send a fault as the answer of a request. Raises Stuck if the device is lost."""
        self.pipes.send("problem", problem_of(fault), request=question.number)
        if question.running is not None:
            question.running.leave()
        if question.parts is not None:
            question.parts.close()
        self.model.recover(fault)
        self._forget(question)

    def _forget(self, question: AskedQuestion) -> None:
        """Let a request go that has its answer, and what it held."""
        for discard in self.discards:
            discard(question)
        question.work = question.parts = None
        self._questions.pop(question.number, None)
        self._give_back()
        held = {"held_bytes": self.model.held_bytes(), "adapter_bytes": self.model.adapter_bytes()}
        self.pipes.send("done", held, request=question.number)

    def _give_back(self) -> None:
        """Give back what the requests under way do not need, before the server counts without it."""
        needed = sum(question.need for question in self)
        if private_bytes() > self._least + needed + MUCH:
            held = held_after_giving_back()
            self._least = self._least if self._questions else held


def held_after_giving_back() -> int:
    """Give freed memory back to the system, and return the bytes that the process holds."""
    give_back_freed_memory()
    return private_bytes()

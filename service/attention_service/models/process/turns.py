"""The loop of a model's process. In each turn it takes messages, answers one question, and gives running texts a token.

A request is checked and priced as soon as it comes (``need``), and begins when the server has admitted it (``go``).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from attention_contract.base import WireModel
from attention_contract.json_writing import AT_ONCE, tensor_bytes, to_json
from attention_contract.schemas.prompts import ModelRan
from attention_contract.tensor_files import to_safetensors
from attention_contract.tensors import Encoding
from attention_contract.wire import JSON, SAFETENSORS
from attention_service.core.cancellation import Abandoned, Cancellation, cancellable, checkpoint
from attention_service.core.tensors import results_in
from attention_service.models.process.process_pipes import ProcessPipes, problem_of
from attention_service.models.process.served import Answer, Load, PricedRun, Served
from attention_service.models.reply_memory import ReplySpace
from attention_service.models.worker_messages import Message, Piece
from attention_service.modules.recording_files import content_id
from attention_service.runtime.device.freed_memory import (
    MUCH,
    give_back_freed_memory,
    keep_freed_memory,
    private_bytes,
)
from attention_service.runtime.scheduling.fair_queue import FairQueue

_PROMPTS: Final = 512
"""Tokens of prompts that are read in one turn, so that texts that run wait no longer."""
_SHARED: Final = 1.1
"""Memory that a pass of several questions may take, as a multiple of what they were admitted for."""
_MOMENT_S: Final = 0.002
"""Seconds for which requests that could share a pass are waited for, if they are priced and not yet admitted."""
_LONG_S: Final = 1.0
"""Seconds that a pass may take without the server being told before."""
_SHORT_S: Final = 0.1
"""Seconds that a question counts at least, where callers share the time of the process."""


@dataclass(eq=False)
class Question:
    """A request that has not ended."""

    number: int
    caller: str
    cancellation: Cancellation
    memory: ReplySpace
    form: str = SAFETENSORS
    """The media type of its reply."""
    encoding: Encoding = "list"
    """The form of tensors in a JSON reply."""
    waits: dict[str, float] = field(default_factory=dict)
    """The fields of ``ran`` that the server told when it admitted the request."""
    owner: str | None = None
    """The owner of its recording, as told then."""
    alone: bool = False
    """True if its numbers are to be the same bits every time."""
    work: PricedRun | None = None
    """Its work once it is admitted; None before it is priced, and once it runs."""
    need: int = 0
    """The most bytes that it was priced at."""
    running: Any = None
    """Its generation, once that has begun."""
    seconds: float = 0.0
    """The time of a pass over the whole text of its generation, if that is long."""


@dataclass(eq=False)
class Turns:
    """The requests of a process."""

    pipes: ProcessPipes
    model: Served
    memories: Sequence[ReplySpace]
    """The memories in which replies are made."""
    questions: dict[int, Question] = field(default_factory=dict)
    ready: FairQueue[Question] = field(default_factory=FairQueue)
    """The questions that were admitted."""
    running: list[Question] = field(default_factory=list)
    """Generations."""
    unread: FairQueue[Question] = field(default_factory=FairQueue)
    """Generations with a prompt that is still to be read."""
    step_s: float = 0.0
    """Seconds that the last token of all running texts took."""
    least: int = 0
    """The bytes of the process when it last gave memory back."""

    def run(self) -> None:
        """Answer requests until the end of the input, which ends the process."""
        self.least = held_after_giving_back()
        while True:
            self.take_messages()
            with self.model.turn(alone=any(each.alone for each in self.questions.values())):
                self.begin_generations()
                if self.ready:
                    self.answer_next()
                if self.running:
                    self.decode()

    def take_messages(self) -> None:
        """Take in what came; if there is nothing to do, wait for a message.

        Requests that come at the same time are admitted one after the other. If nothing runs, a pass is put off while
        they are, as long as a message comes within a moment of the one before.
        """
        for message in self.pipes.arrived(wait_s=0 if self.ready or self.running else None):
            self.take(message)
        while self.expects_mates() and (messages := self.pipes.arrived(wait_s=_MOMENT_S)):
            for message in messages:
                self.take(message)

    def expects_mates(self) -> bool:
        """True if nothing runs, and a request that is not admitted yet could share the pass that is next."""
        if self.running or not self.ready:
            return False
        ready = set(map(id, self.ready))
        next_one = self.ready.first().work
        priced = [each.work for each in self.questions.values() if id(each) not in ready]
        return any(one is not None and next_one is not None and one.may_share(next_one) for one in priced)

    def take(self, message: Message) -> None:
        """Take in one message about a request."""
        number = message.facts["request"]
        if message.kind == "ask":
            self.ask(number, message)
            return
        question = self.questions.get(number)
        if question is None:  # a cancellation that came too late
            return
        if message.kind == "go":
            question.waits = {name: message.facts[name] for name in ("queue_ms", "load_ms")}
            question.owner = message.facts["owner"]
            self.ready.add(question)
        elif question not in self.running:
            self.fail(question, Abandoned())

    def ask(self, number: int, message: Message) -> None:
        """Check and price a request."""
        facts = message.facts
        memory = facts["memory"]
        space = ReplySpace(None) if memory is None else self.memories[memory]
        cancellation, form, encoding = self.pipes.cancellation(number), facts["form"], facts["encoding"]
        question = Question(
            number, facts["caller"], cancellation, space, form, encoding, alone=facts.get("alone", False)
        )
        self.questions[number] = question
        with self.guarded(question):
            question.work = self.model.prepare(
                facts["operation"], message.body, facts, lambda event: self.emit(number, event)
            )
            self.price(question)

    def price(self, question: Question) -> None:
        """Tell the server what a request needs."""
        if question.work is not None:
            question.need = max(question.need, question.work.needed_bytes)
            self.pipes.send("need", {"bytes": question.need}, request=question.number)

    def begin_generations(self) -> None:
        """Begin all generations that are ready, so that their prompts are read together."""
        for question in [each for each in self.ready if each.work is not None and each.work.generates]:
            self.ready.remove(question)
            self.answer(question)

    def answer_next(self) -> None:
        """Answer a question of the caller who used the least time, and with it those that can share its pass."""
        first = self.ready.first()
        mates = [first, *self._alike(first)]
        for each in mates:
            self.ready.begin(each, _SHORT_S if each.work is None else max(each.work.seconds, _SHORT_S))
        if len(mates) == 1:
            self.answer(first)
            return
        self._announce(sum(each.work.seconds for each in mates if each.work is not None))
        try:
            answers = self.model.answer_joined([each.work.question for each in mates if each.work is not None])
        except Exception as fault:  # whoever is at fault, nobody else has the fault
            self.model.recover(fault)
            for each in mates:
                self.answer(each)
            return
        for each, answer in zip(mates, answers, strict=True):
            with self.guarded(each):
                each.memory.open(each.need)  # the server may have cut it since the reply before
                self.end(each, answer)

    def _alike(self, first: Question) -> list[Question]:
        """The ready questions that share a pass with one, within the memory that all were admitted for."""
        work, found = first.work, list[Question]()
        if work is None or work.group is None:
            return found
        needs, lengths = [first.need], [work.length]
        for each in self.ready:
            other = each.work
            if each is first or other is None or other.group != work.group or each.cancellation.cancelled:
                continue
            tried, sizes = [*needs, each.need], [*lengths, other.length]
            if max(sizes) <= 2 * min(sizes) and len(tried) * max(tried) <= _SHARED * sum(tried) + MUCH:
                needs, lengths = tried, sizes
                found.append(each)
        return found

    def answer(self, question: Question) -> None:
        """Run a request that was admitted: a question to its end, a generation to its beginning."""
        work, question.work = question.work, None
        if work is None:
            return
        self._announce(0.0 if work.generates else work.seconds)
        with self.guarded(question):
            checkpoint()
            question.memory.open(question.need)
            with results_in(question.memory.empty):
                found = work.run()
            if isinstance(found, PricedRun):
                question.work = found
                self.price(question)
            elif isinstance(found, Answer):
                self.end(question, found)
            else:
                question.running, question.seconds = found, work.seconds
                self.running.append(question)
                if found.unread:
                    self.unread.add(question)

    def _announce(self, seconds: float) -> None:
        """Tell the server that nothing may come for so long."""
        if seconds > _LONG_S:
            self.pipes.send("pass", {"seconds": seconds})

    def decode(self) -> None:
        """Read prompts, and give each running text its next token."""
        for each in [each for each in self.running if each.cancellation.cancelled]:
            self.fail(each, Abandoned())
        if self.unread:
            self.read()
        if self.running:
            self._announce(self.step_s)
            began = time.monotonic()
            self._advance(self.running, self.model.step)
            self.step_s = time.monotonic() - began

    def read(self) -> None:
        """Read prompts, first those of the caller of whom the least was read."""
        reading = self.unread.by_share()
        before = [each.running.unread for each in reading]
        self._announce(max(each.seconds for each in reading))
        self._advance(reading, lambda running: self.model.read(running, _PROMPTS))
        for question, unread in zip(reading, before, strict=True):
            left = 0 if question.running is None else question.running.unread
            self.unread.use(question, unread - left)
            if not left and question in self.unread:
                self.unread.remove(question)

    def _advance(self, questions: Sequence[Question], step: Callable[[Sequence[Any]], dict[int, Exception]]) -> None:
        """Take a step of generations. Each that fails gets its fault, and each that ends its end."""
        questions = list(questions)
        try:
            faults = step([each.running for each in questions])
        except Exception as fault:  # of none in particular
            faults = dict.fromkeys(range(len(questions)), fault)
        for at, question in enumerate(questions):
            if at in faults:
                self.fail(question, faults[at])
            else:
                self.end_if_ended(question)

    def end_if_ended(self, question: Question) -> None:
        """Send the end of a generation that has all its tokens."""
        if question.running is not None and question.running.has_ended:
            self._announce(question.seconds)
            with self.guarded(question):
                found = self.model.finish(question.running)
                if isinstance(found, PricedRun):
                    self._leave_running(question)
                    question.work = found
                    self.price(question)
                else:
                    self.end(question, found)

    def emit(self, number: int, event: bytes) -> None:
        """Send an event of a request."""
        self.pipes.send("event", body=[event], request=number)

    def end(self, question: Question, answer: Answer) -> None:
        """Send an answer, written as the caller gets it."""
        number, last, reply, more = question.number, answer.last, answer.reply, dict[str, Any]()
        if answer.recording is not None:
            self.pipes.send("recording", body=to_safetensors(answer.recording, "recording"), request=number)
            more["recording"] = content_id(answer.recording, question.owner)
        if last is not None:
            last = [*last[:-1], *(each | more for each in last[-1:])]
            self.pipes.send("last", {"tokens": answer.tokens}, [lines_of(last)], request=number)
        if reply is not None:
            compute_ms = 0.0
            if isinstance(of_run := getattr(reply, "ran", None), ModelRan):
                compute_ms = of_run.compute_ms
                ran = of_run.model_copy(update={**question.waits, "peak_bytes": question.need})
                reply = reply.model_copy(update={"ran": ran, **more})
            media_type, pieces = written(reply, question.form, question.encoding)
            places, inline = question.memory.leave(pieces)
            facts = {"places": places, "media_type": media_type, "compute_ms": compute_ms}
            self.pipes.send("reply", facts, inline, request=number)
        self.forget(question)

    def fail(self, question: Question, fault: Exception) -> None:
        """Send a fault as the answer of a request. Raises Stuck if the device is lost."""
        self.pipes.send("problem", problem_of(fault), request=question.number)
        if question.running is not None:
            question.running.leave()
        self.model.recover(fault)
        self.forget(question)

    def forget(self, question: Question) -> None:
        """Let a request go that has its answer, and what it held."""
        self._leave_running(question)
        if question in self.ready:
            self.ready.remove(question)
        self.questions.pop(question.number, None)
        self.give_back()
        held = {"held_bytes": self.model.held_bytes(), "adapter_bytes": self.model.adapter_bytes()}
        self.pipes.send("done", held, request=question.number)

    def _leave_running(self, question: Question) -> None:
        """Let a request generate no more."""
        if question in self.running:
            self.running.remove(question)
        if question in self.unread:
            self.unread.remove(question)
        question.running = None

    def give_back(self) -> None:
        """Give back what the requests under way do not need, before the server counts without it."""
        needed = sum(each.need for each in self.questions.values())
        if private_bytes() > self.least + needed + MUCH:
            held = held_after_giving_back()
            self.least = self.least if self.questions else held

    @contextmanager
    def guarded(self, question: Question) -> Iterator[None]:
        """Let the request of a block be cancelled, and answer it if the block fails."""
        try:
            with cancellable(question.cancellation):
                yield
        except Exception as fault:
            self.fail(question, fault)


def written(reply: WireModel, form: str, encoding: Encoding) -> tuple[str, Sequence[Piece]]:
    """Return the media type and the pieces of a reply.

    A JSON text of many numbers is not made here, where it would hold up other requests: the server makes it piece by
    piece from safetensors, while it is sent.
    """
    if form == JSON and tensor_bytes(reply) <= AT_ONCE:
        return JSON, [to_json(reply, encoding)]
    return SAFETENSORS, to_safetensors(reply, "reply")


def lines_of(objects: Sequence[Any]) -> bytes:
    """Objects as JSON, one a line. Their numbers are finite."""
    return b"\n".join([orjson.dumps(each, option=orjson.OPT_SERIALIZE_NUMPY) for each in objects])


def held_after_giving_back() -> int:
    """Give freed memory back to the system, and return the bytes that the process holds."""
    give_back_freed_memory()
    return private_bytes()


def serve(load: Load, warm: Callable[[], None] = lambda: None) -> None:
    """Load the model that the server names, and answer requests to it.

    ``warm`` is called in a spare process, and imports what a load would.
    """
    keep_freed_memory()
    pipes = ProcessPipes.take_over()
    if (message := pipes.next()).kind == "warm":
        warm()
    pipes.send("started", {"own_bytes": private_bytes()})
    facts = (pipes.next() if message.kind == "warm" else message).facts
    try:
        model: Served = load(facts, lambda share: pipes.send("progress", {"share": share}))
        pipes.send("loaded", model.info() | {"held_bytes": model.held_bytes()})
    except Exception as fault:  # whatever a checkpoint does to the code of its model
        pipes.send("problem", problem_of(fault))
        raise SystemExit(1) from None
    Turns(pipes, model, [ReplySpace(file) for file in facts["memories"]]).run()

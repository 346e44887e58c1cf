"""The loop of a model's process. In each turn it takes messages, answers a part of one question, and decodes a token.

A request is checked and priced (``need``), and begins when the server has admitted it (``go``). Callers get equal
shares of the time: the next part is of the caller who used the least, and texts that run get further tokens before it
while their callers used less. Nobody waits for more than one part of another caller's question.
"""

import gc
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from attention_service.core.cancellation import checkpoint
from attention_service.core.tensors import results_in
from attention_service.models.inputs.long_texts import LongText, reading_beside
from attention_service.models.process.asked_question import AskedQuestion
from attention_service.models.process.open_questions import OpenQuestions
from attention_service.models.process.process_pipes import ProcessPipes, load_problem
from attention_service.models.process.running_generations import RunningGenerations
from attention_service.models.process.served import Answer, Load, Parts, PricedRun, Served
from attention_service.models.process.text_thread import TextThread
from attention_service.models.reply_memory import ReplySpace
from attention_service.models.worker_messages import WorkerMessage
from attention_service.runtime.device.freed_memory import MUCH, keep_freed_memory, private_bytes
from attention_service.runtime.scheduling.fair_queue import FairQueue

_SHARED: Final = 1.1
"""Memory that a pass of several questions may take, as a multiple of what they were admitted for."""
_MOMENT_S: Final = 0.002
"""Seconds for which requests that could share a pass are waited for, if they are priced and not yet admitted."""
_LEAST_S: Final = 0.001
"""Seconds that a part counts at least, where callers share the time of the process."""
_SHORT_BODY: Final = 16_384
"""Bytes of a request that is checked and priced as soon as it comes. A longer one waits for its caller's turn."""


class Turns:
    """The loop over the requests of a process."""

    def __init__(
        self, pipes: ProcessPipes, model: Served, memories: Sequence[ReplySpace],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """``memories``: those in which replies are made. ``clock`` tells the seconds that parts take."""
        self._pipes, self._model, self._clock = pipes, model, clock
        self._questions = OpenQuestions(pipes, model, memories)
        self._ready: FairQueue[AskedQuestion] = FairQueue()
        """The questions that were admitted, or are to be checked, and have no answer."""
        self._generations = RunningGenerations(self._questions)
        self._texts = TextThread(pipes)
        self._questions.discards = [self._ready.discard, self._generations.discard, self._texts.discard]
        self._began_new = False
        """True if the last turn began a question; the next one goes on with one that has begun."""

    def run(self) -> None:
        """Answer requests until the end of the input, which ends the process."""
        while True:
            self._take_messages()
            spares_core = self._texts.reads and not any(question.alone for question in self._questions)
            with self._model.turn(spares_core=spares_core):
                if self._ready.size:
                    self._begin_generations()
                if self._ready.size and not self._generations_first():
                    self._answer_next()
                if self._generations.running:
                    with self._counted([*self._generations.running]):
                        self._generations.advance()

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_messages(self) -> None:
        """Take in what came; if there is nothing to do, wait for a message.

        Requests that come at the same time are admitted one after the other. If nothing runs, a pass is put off while
        they are, as long as a message comes within a moment of the one before.
        """
        running = self._generations.running
        for message in self._pipes.arrived(wait_s=0 if running or self._ready.size else None):
            self._take(message)
        while not running and self._expects_mates() and (messages := self._pipes.arrived(wait_s=_MOMENT_S)):
            for message in messages:
                self._take(message)

    def _expects_mates(self) -> bool:
        """True if a request that is not admitted yet could share the pass that is next."""
        if not self._ready.size or (next_one := self._next().work) is None:
            return False
        ready = set(map(id, self._ready))
        priced = [question.work for question in self._questions if id(question) not in ready]
        return any(one is not None and one.may_share(next_one) for one in priced)

    def _take(self, message: WorkerMessage) -> None:
        """Take in one message about a request."""
        if message.kind == "ask":
            self._ask(message)
            return
        question = self._questions.get(message.facts["request"])
        if question is None:  # a cancellation, or a text, that came too late
            self._texts.go_on()
        elif message.kind == "go":
            question.waits = {name: message.facts[name] for name in ("queue_ms", "load_ms")}
            question.owner = message.facts["owner"]
            self._ready.add(question)
        elif message.kind == "read":
            self._texts.go_on()
            self._ready.add(question)
        elif question not in self._generations:
            self._questions.leave(question)

    def _ask(self, message: WorkerMessage) -> None:
        """Check and price a request: at once if it is short, and else in a turn of its caller."""
        facts, question = message.facts, self._questions.open(message)
        emit = partial(self._questions.emit, question.number)
        question.work = PricedRun(0, partial(self._model.prepare, facts["operation"], message.body, facts, emit))
        if len(message.body) <= _SHORT_BODY:
            self._begin(question)
        else:
            self._ready.add(question)

    # ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_generations(self) -> None:
        """Begin all generations that are ready, so that their prompts are read together."""
        for question in [asked for asked in self._ready if asked.work is not None and asked.work.generates]:
            self._ready.remove(question)
            self._begin(question)

    def _generations_first(self) -> bool:
        """True if a caller whose text runs used less of the time than the one whose question is next."""
        running = [generation.caller for generation in self._generations.running]
        return bool(running) and self._ready.used(running) < self._ready.used([self._ready.first().caller])

    def _next(self) -> AskedQuestion:
        """The question that is next, of the caller who used the least of the time.

        A question in parts does not hold up its caller's short ones, nor do these hold it up: by turns one begins,
        and the first of those that have begun goes on.
        """
        line = [*self._ready.line()]
        begun = [asked for asked in line if asked.parts is not None]
        new = [asked for asked in line if asked.parts is None]
        return begun[0] if begun and (self._began_new or not new) else new[0]

    def _answer_next(self) -> None:
        """Answer a part of the question that is next, and with it those that can share its pass."""
        first = self._next()
        self._began_new = first.parts is None
        mates = [first, *self._alike(first)]
        with self._counted(mates):
            if len(mates) > 1:
                self._answer_together(mates)
            elif first.parts is not None:
                self._go_on(first, first.parts)
            else:
                self._ready.remove(first)
                self._begin(first)

    @contextmanager
    def _counted(self, questions: Sequence[AskedQuestion]) -> Iterator[None]:
        """Count the time of a block as that of the callers of these questions, in equal shares."""
        began = self._clock()
        yield
        share = max(self._clock() - began, _LEAST_S) / len(questions)
        for question in questions:
            self._ready.use_of(question.caller, share)

    def _answer_together(self, mates: Sequence[AskedQuestion]) -> None:
        """Answer questions by one pass; if it fails, each by its own."""
        for mate in mates:
            self._ready.remove(mate)
        works = [mate.work for mate in mates if mate.work is not None]
        self._questions.announce(sum(work.seconds for work in works))
        try:
            answers = self._model.answer_joined([work.question for work in works])
        except Exception as fault:  # whoever is at fault, nobody else has the fault
            self._model.recover(fault)
            for mate in mates:
                self._begin(mate)
            return
        for mate, answer in zip(mates, answers, strict=True):
            with self._questions.guarded(mate):
                mate.memory.open(mate.need)  # the server may have cut it since the reply before
                self._questions.end(mate, answer)

    def _alike(self, first: AskedQuestion) -> list[AskedQuestion]:
        """The ready questions that share a pass with one, within the memory that all were admitted for."""
        work, mates = first.work, list[AskedQuestion]()
        if work is None or work.group is None:
            return mates
        needs, lengths = [first.need], [work.length]
        for candidate in self._ready:
            other = candidate.work
            if candidate is first or other is None or other.group != work.group or candidate.cancellation.cancelled:
                continue
            tried, sizes = [*needs, candidate.need], [*lengths, other.length]
            if max(sizes) <= 2 * min(sizes) and len(tried) * max(tried) <= _SHARED * sum(tried) + MUCH:
                needs, lengths = tried, sizes
                mates.append(candidate)
        return mates

    def _begin(self, question: AskedQuestion) -> None:
        """Run work of a request: to its price, its answer, the end of its first part, or a generation's beginning."""
        work, question.work = question.work, None
        if work is None:
            return
        self._questions.announce(0.0 if work.generates else work.seconds)
        with self._questions.guarded(question):
            checkpoint()
            question.memory.open(question.need)
            try:
                with results_in(question.memory.empty), reading_beside(question.texts):
                    outcome = work.run()
            except LongText as text:
                question.work = work  # to be run again once the text is read
                self._texts.read(question, text)
                return
            question.seconds = work.seconds
            if isinstance(outcome, PricedRun):
                self._questions.price(question, outcome)
            elif isinstance(outcome, Answer):
                self._questions.end(question, outcome)
            elif isinstance(outcome, Generator):
                question.parts = outcome
                self._ready.add(question)
                self._go_on(question, outcome)
            else:
                question.running = outcome
                self._generations.add(question)

    def _go_on(self, question: AskedQuestion, parts: Parts) -> None:
        """Run one part of a question."""
        self._questions.announce(question.seconds)
        with self._questions.guarded(question):
            checkpoint()
            try:
                with results_in(question.memory.empty):
                    question.seconds = next(parts)
            except StopIteration as end:
                question.parts = None
                self._ready.discard(question)
                if isinstance(end.value, PricedRun):
                    self._questions.price(question, end.value)
                else:
                    self._questions.end(question, end.value)


def serve(load: Load, warm: Callable[[], None] = lambda: None) -> None:
    """Load the model that the server names, and answer requests to it.

    ``warm`` is called in a spare process, and imports what a load would.
    """
    keep_freed_memory()
    pipes = ProcessPipes.take_over()
    if (message := pipes.next()).kind == "warm":
        warm()
        _leave_out_of_collections()
    pipes.send("started", {"own_bytes": private_bytes()})
    facts = (pipes.next() if message.kind == "warm" else message).facts
    try:
        model: Served = load(facts, lambda share: pipes.send("progress", {"share": share}))
        pipes.send("loaded", model.info() | {"held_bytes": model.held_bytes()})
    except Exception as fault:  # whatever a checkpoint does to the code of its model
        pipes.send("problem", load_problem(fault))
        raise SystemExit(1) from None
    _leave_out_of_collections()
    Turns(pipes, model, [ReplySpace(file) for file in facts["memories"]]).run()


def _leave_out_of_collections() -> None:
    """Collect garbage, and leave all that is left out of later collections, since it stays.

    Looking through a model and the modules of transformers takes a quarter of a second, in which nobody has a turn.
    """
    gc.collect()
    gc.freeze()

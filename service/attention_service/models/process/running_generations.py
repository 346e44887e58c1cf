"""The generations of a process: in each turn their prompts are read on, and each text gets its next token."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from attention_service.models.process.asked_question import AskedQuestion
from attention_service.models.process.open_questions import OpenQuestions
from attention_service.models.process.served import PricedRun
from attention_service.runtime.scheduling.fair_queue import FairQueue

_PROMPTS: Final = 512
"""Tokens of prompts that are read in one turn, so that texts that run wait no longer."""


class RunningGenerations:
    """The generations that have begun, and those of them whose prompts are still to be read."""

    def __init__(self, questions: OpenQuestions) -> None:
        self._questions, self._model = questions, questions.model
        self.running: list[AskedQuestion] = []
        """The questions of all generations."""
        self._unread: FairQueue[AskedQuestion] = FairQueue()
        self._step_s = 0.0
        """Seconds that the last token of all running texts took."""

    def __contains__(self, question: AskedQuestion) -> bool:
        """Return True if this is the question of a generation."""
        return question in self.running

    def add(self, question: AskedQuestion) -> None:
        """Let a generation run."""
        self.running.append(question)
        if question.running.unread:
            self._unread.add(question)

    def discard(self, question: AskedQuestion) -> None:
        """Let a request generate no more."""
        if question in self.running:
            self.running.remove(question)
        self._unread.discard(question)
        question.running = None

    def advance(self) -> None:
        """Read prompts, and give each running text its next token."""
        for question in [*self.running]:
            if question.cancellation.cancelled:
                self._questions.leave(question)
        if self._unread.size:
            self._read()
        if self.running:
            self._questions.announce(self._step_s)
            began = time.monotonic()
            self._step(self.running, self._model.step)
            self._step_s = time.monotonic() - began

    def _read(self) -> None:
        """Read prompts, first those of the caller of whom the least was read."""
        reading = self._unread.by_share()
        before = [question.running.unread for question in reading]
        self._questions.announce(max(question.seconds for question in reading))
        self._step(reading, lambda running: self._model.read(running, _PROMPTS))
        for question, unread in zip(reading, before, strict=True):
            left = 0 if question.running is None else question.running.unread
            self._unread.use(question, unread - left)
            if not left:
                self._unread.discard(question)

    def _step(self, questions: Sequence[AskedQuestion], step: Callable[[Sequence[Any]], dict[int, Exception]]) -> None:
        """Take a step of generations. Each that fails gets its fault, and each that ends its end."""
        questions = list(questions)
        try:
            faults = step([question.running for question in questions])
        except Exception as fault:  # of none in particular
            faults = dict.fromkeys(range(len(questions)), fault)
        for at, question in enumerate(questions):
            if at in faults:
                self._questions.fail(question, faults[at])
            elif question.running is not None and question.running.has_ended:
                self._end(question)
            elif question.running is not None and question.running.unread and question not in self._unread:
                self._unread.add(question)  # the next window of a sound

    def _end(self, question: AskedQuestion) -> None:
        """Send the end of a generation."""
        self._questions.announce(question.seconds)
        with self._questions.guarded(question):
            ended = self._model.finish(question.running)
            if isinstance(ended, PricedRun):
                self.discard(question)
                self._questions.price(question, ended)
            else:
                self._questions.end(question, ended)

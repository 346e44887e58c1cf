"""The requests of one model: those that wait, and those that its process has."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import Final

from attention_contract.errors import AttentionError, InternalError
from attention_contract.schemas.models import ModelInfo
from attention_service.models.server.model_environment import ModelEnvironment
from attention_service.models.server.model_memory import MemoryShare
from attention_service.models.server.model_question import Question, QuestionRun
from attention_service.models.server.worker_process import WorkerProcess
from attention_service.runtime.scheduling.fair_queue import FairQueue
from attention_service.runtime.scheduling.passes import draining

log = logging.getLogger(__name__)
RUNNING: Final = 32
"""Requests that a process has at once, of one caller or of several."""
OF_ONE: Final = RUNNING // 2
"""The same of one caller while others wait, and of these others beyond ``RUNNING`` while one caller has so many."""


class ModelQueue:
    """The requests of one model. Callers get equal shares of the model's time."""

    def __init__(
        self,
        environment: ModelEnvironment,
        share: MemoryShare,
        info: Callable[[], ModelInfo],
        on_idle: Callable[[], None],
    ) -> None:
        """``info`` describes the model. ``on_idle`` is called when its process has nothing to do any more."""
        self.waiting: FairQueue[Question] = FairQueue()
        self._environment = environment
        self._share = share
        self._info = info
        self._on_idle = on_idle
        self._running: dict[Question, asyncio.Task[None]] = {}
        """The requests that the process has, and the tasks that speak with it about each."""
        self._worker: WorkerProcess | None = None
        """The process while it takes requests."""

    @property
    def running(self) -> int:
        """The number of requests that the process has."""
        return len(self._running)

    def add(self, question: Question) -> None:
        """Let a request wait, or run at once."""
        self.waiting.add(question)
        self._run_next()

    def discard(self, question: Question) -> None:
        """Take out a request that waits no longer; one that runs ends by itself."""
        if question in self.waiting:
            self.waiting.remove(question)

    def fail_all(self, fault: AttentionError) -> None:
        """Answer all that wait with an error."""
        for question in list(self.waiting):
            self.waiting.remove(question)
            question.fail(fault)

    def open(self, worker: WorkerProcess) -> None:
        """Give a process that has the model the requests from now on."""
        self._worker = worker
        self._run_next()

    def cancel(self) -> None:
        """Give up what runs, for its process is to end now."""
        self._worker = None
        for task in self._running.values():
            task.cancel()

    async def close(self) -> None:
        """Give the process no request any more, and wait for those that it has, which end with it."""
        self._worker = None
        if self._running:
            await asyncio.wait(self._running.values())

    def _run_next(self) -> None:
        """Give the process those that wait, as many as it may have."""
        while self._worker is not None and self._worker.is_alive and not self._share.ends:
            barred = self._callers_with_half()
            others_wait = bool(barred) and self.waiting.has_other(barred)
            limit = RUNNING + OF_ONE if others_wait else RUNNING
            if not self.waiting.size or len(self._running) >= limit:
                return
            question = self.waiting.first(barred if others_wait else ())
            self.waiting.begin(question, question.cost)
            if question.done.done():
                continue
            if question.operation is None:
                question.info = self._info()
                question.succeed()
                continue
            run = QuestionRun(question, self._worker, self._environment, self._share).run()
            task = self._running[question] = asyncio.create_task(run, context=Context())
            task.add_done_callback(partial(self._end, question, self._worker))

    def _callers_with_half(self) -> set[str]:
        """Callers who have half of the places."""
        if len(self._running) < OF_ONE:
            return set()
        return {
            name for name, count in Counter(answering.caller for answering in self._running).items() if count >= OF_ONE
        }

    def _end(self, question: Question, worker: WorkerProcess, task: "asyncio.Task[None]") -> None:
        """Note that a request runs no longer, and give it its error if there is one."""
        del self._running[question]
        if task.cancelled():
            question.fail(draining())
        elif isinstance(fault := task.exception(), AttentionError):  # the process has ended
            if question.began or question.is_repeated or question.done.done():
                question.fail(fault)
            else:
                question.is_repeated = True
                self.waiting.add(question)
        elif fault is not None:
            log.error("a request could not be served", exc_info=fault)
            question.fail(unexpected())
            worker.kill()  # nobody knows what it does with the memory of the request
        self._run_next()
        if not self._running:
            self._on_idle()


def unexpected() -> AttentionError:
    """The answer of a server at fault."""
    return InternalError("the model could not be served; the server's log has the cause")

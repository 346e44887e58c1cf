"""The thread that reads long texts beside the loop of a model's process, one after the other."""

import sys
import threading
from typing import Final

from attention_service.models.inputs.long_texts import LongText
from attention_service.models.process.asked_question import AskedQuestion
from attention_service.models.process.process_pipes import ProcessPipes
from attention_service.models.worker_messages import WorkerMessage
from attention_service.runtime.scheduling.fair_queue import FairQueue

_SWITCH_S: Final = 0.0005
"""Seconds after which the thread lets the loop go on between two operations of PyTorch, in place of Python's 0.005."""


class TextThread:
    """Questions whose long texts are to be read, callers in turn. Their message ``read`` comes when they are."""

    def __init__(self, pipes: ProcessPipes) -> None:
        self._pipes = pipes
        self._waiting: FairQueue[AskedQuestion] = FairQueue()
        self._texts: dict[AskedQuestion, LongText] = {}
        self.reads = False
        """True while a text is being read, which takes one core."""

    def read(self, question: AskedQuestion, text: LongText) -> None:
        """Have a text of a question read."""
        self._texts[question] = text
        self._waiting.add(question)
        self.go_on()

    def discard(self, question: AskedQuestion) -> None:
        """Read no text of a question that has its answer; one that is being read is read to its end."""
        self._waiting.discard(question)
        self._texts.pop(question, None)

    def go_on(self) -> None:
        """Begin with the next text, unless one is being read."""
        if self.reads or not self._waiting:
            return
        question = self._waiting.first()
        self._waiting.begin(question, 1)
        self.reads = True
        threading.Thread(target=self._read, args=(question.number, self._texts.pop(question)), daemon=True).start()

    def _read(self, number: int, text: LongText) -> None:
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        try:
            text.read()
        finally:
            sys.setswitchinterval(before)
            self.reads = False
            self._pipes.post(WorkerMessage("read", {"request": number}, memoryview(b"")))

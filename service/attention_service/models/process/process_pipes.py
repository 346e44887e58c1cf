"""The two pipes of a model's process, and its life: it ends with its standard input, and with its server."""

import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from queue import Empty, SimpleQueue
from typing import Any, Final, Self

from attention_contract.errors import AttentionError, InternalError, NeverFits
from attention_service.core.cancellation import Abandoned, Cancellation
from attention_service.models.worker_messages import Piece, WorkerMessage, pieces_of, read_message
from attention_service.runtime.device.torch_device import is_out_of_memory

_PR_SET_PDEATHSIG: Final = 1
"""The option of ``prctl`` that sends a signal when the parent ends, of ``linux/prctl.h``."""


class ProcessPipes:
    """The messages of a process; those about a request carry its number."""

    def __init__(self, source: FileIO, sink: FileIO) -> None:
        self._source, self._sink = source, sink
        self._inbox: SimpleQueue[WorkerMessage] = SimpleQueue()
        self._cancellations: dict[int, Cancellation] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    @classmethod
    def take_over(cls) -> Self:
        """Speak over standard input and output; what libraries print goes to standard error."""
        _end_with_server()
        source, sink = FileIO(os.dup(0), "r"), FileIO(os.dup(1), "w")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        return cls(source, sink)

    def next(self) -> WorkerMessage:
        """Wait for the next message."""
        return self._inbox.get()

    def arrived(self, *, wait_s: float | None) -> list[WorkerMessage]:
        """Return the messages that came; ``wait_s``: seconds to wait for the first, None for as long as it takes."""
        messages = []
        with suppress(Empty):
            messages.append(self._inbox.get(timeout=wait_s) if wait_s != 0 else self._inbox.get_nowait())
            while True:
                messages.append(self._inbox.get_nowait())
        return messages

    def post(self, message: WorkerMessage) -> None:
        """Add a message of the process itself to those that arrive."""
        self._inbox.put(message)

    def cancellation(self, request: int) -> Cancellation:
        """The flag of a request that has not ended."""
        return self._cancellations[request]

    def send(
        self, kind: str, facts: dict[str, Any] | None = None, body: Sequence[Piece] = (), *, request: int | None = None
    ) -> None:
        """Send a message; ``done`` is the last about its request."""
        content = (facts or {}) if request is None else {"request": request} | (facts or {})
        if kind == "done" and request is not None:
            self._cancellations.pop(request, None)
        for piece in pieces_of(kind, content, body):
            view = memoryview(piece)
            while view:
                view = view[self._sink.write(view) :]

    def _listen(self) -> None:
        """Take in messages, and end the process with its input, whatever it computes."""
        while (message := read_message(self._source)) is not None:
            number = message.facts.get("request", 0)
            if message.kind == "ask":
                self._cancellations[number] = Cancellation(message.facts.get("deadline"))
            elif message.kind == "cancel" and (flag := self._cancellations.get(number)) is not None:
                flag.cancel()  # at once, whatever is being computed
            self._inbox.put(message)
            del message
        os._exit(0)


def _end_with_server() -> None:
    """Have the system end this process with the thread that started it, also while it is stopped. On Linux alone."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def problem_of(fault: Exception) -> dict[str, Any]:
    """Return the problem document of a fault, with ``traceback`` for the server's log if nobody expects it."""
    if isinstance(fault, AttentionError):
        return fault.to_problem()
    if isinstance(fault, Abandoned):
        return AttentionError("nobody waits for it").to_problem()
    if is_out_of_memory(fault):
        return NeverFits("the device ran out of memory after all; ask for less at a time").to_problem()
    reason = f"{type(fault).__name__}: {fault}"[:500]
    problem = InternalError(f"the model failed ({reason}); the server's log has the cause").to_problem()
    return problem | {"traceback": "".join(traceback.format_exception(fault))}


def load_problem(fault: Exception) -> dict[str, Any]:
    """Return the problem document of a load, with ``traceback`` if another fault caused it."""
    caused = {"traceback": "".join(traceback.format_exception(fault))} if fault.__cause__ is not None else {}
    return problem_of(fault) | caused

"""The loop of a model's process: it loads one checkpoint, and answers one request after another.

It ends when its standard input is closed, and with the thread that started it, so that none outlives its server.
"""

import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, Protocol

from attention_contract.base import WireModel
from attention_contract.errors import AttentionError, InternalError, NeverFits
from attention_contract.schemas.recordings import RecordingFile
from attention_contract.wire import SAFETENSORS, to_body
from attention_service.core.cancellation import Abandoned, Cancellation, cancellable
from attention_service.core.tensors import results_in
from attention_service.models.reply_memory import ReplyRoom
from attention_service.models.worker_messages import Message, Piece, pieces_of, read_message
from attention_service.runtime.device.freed_memory import (
    MUCH,
    give_back_freed_memory,
    keep_freed_memory,
    private_bytes,
)
from attention_service.runtime.device.torch_device import is_out_of_memory

_PR_SET_PDEATHSIG: Final = 1
"""The option of ``prctl`` that sends a signal when the parent ends, of ``linux/prctl.h``."""


class Work(NamedTuple):
    """A request that was checked, and has allocated nothing."""

    needed_bytes: int
    """Estimate of the memory that it takes besides the model."""
    run: Callable[[], "Answer | Work"]
    """Returns work if the request can be checked only now, as one with images that had to be decoded."""


class Answer(NamedTuple):
    """The answer to a request."""

    reply: WireModel | None = None
    """None of a generation, whose events are its answer."""
    recording: RecordingFile | None = None
    """To be stored, if the request keeps its run."""
    last: bytes | None = None
    """The last event of a generation, in which the server puts the id of the recording."""
    tokens: int = 0
    """The number of generated tokens."""


Emit = Callable[[bytes], None]
"""Sends an event."""


class Served(Protocol):
    """A loaded model, as its process uses it."""

    def info(self) -> dict[str, Any]:
        """Return fields of ModelInfo."""

    def held_bytes(self) -> int | None:
        """Return the memory of a GPU that the process holds; None on a CPU, where the server sees it."""

    def prepare(self, operation: str, body: memoryview, room: int, emit: Emit) -> Work:
        """Check a request. ``room``: bytes that could be admitted. Raises AttentionError."""

    def recover(self, fault: Exception) -> None:
        """Free what a failed request holds. Raises Stuck, which ends the process, if its device is lost."""


Load = Callable[[dict[str, Any], Callable[[float], None]], Served]
"""Loads a model by the facts of ``load``, and tells which share of it is loaded."""


class Worker:
    """The two pipes of a process, and the request that it answers."""

    def __init__(self, source: FileIO, sink: FileIO) -> None:
        self._source = source
        self._sink = sink
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._rooms: list[ReplyRoom] = []
        self._cancellation = Cancellation()
        """The flag of the request that came last; the next comes when this one is done."""

    def serve(self, load: Load, warm: Callable[[], None]) -> None:
        """Load the model and answer requests until the end of the input, which ends the process."""
        threading.Thread(target=self._listen, daemon=True).start()
        if (message := self._inbox.get()).kind == "warm":
            warm()
        self.tell("started", {"own_bytes": private_bytes()})
        facts = (self._inbox.get() if message.kind == "warm" else message).facts
        self._rooms = [ReplyRoom(file) for file in facts["memories"]]
        try:
            model: Served = load(facts, lambda share: self.tell("progress", {"share": share}))
            self.tell("loaded", model.info() | {"held_bytes": model.held_bytes()})
        except Exception as fault:  # whatever a checkpoint does to the code of its model
            self.tell("problem", problem_of(fault))
            raise SystemExit(1) from None
        least = _held_after_giving_back()
        while True:
            message = self._inbox.get()
            if message.kind == "ask":  # and no cancellation that came too late
                self._answer(model, message)
                del message  # its memory is given back too
                if private_bytes() > least + MUCH:
                    least = _held_after_giving_back()
                self.tell("done", {"held_bytes": model.held_bytes()})

    def _listen(self) -> None:
        """Take in messages, and end the process with its input, whatever it computes."""
        while (message := read_message(self._source)) is not None:
            if message.kind == "ask":
                self._cancellation = Cancellation(message.facts.get("deadline"))
            elif message.kind == "cancel":
                self._cancellation.cancel()
            self._inbox.put(message)
            del message
        os._exit(0)

    def _answer(self, model: Served, message: Message) -> None:
        need = 0
        memory = message.facts["memory"]
        room = ReplyRoom(None) if memory is None else self._rooms[memory]
        try:
            with cancellable(self._cancellation):
                facts = message.facts
                answer: Answer | Work = model.prepare(facts["operation"], message.body, facts["room"], self._emit)
                while isinstance(answer, Work):
                    need = max(need, answer.needed_bytes)
                    self.tell("need", {"bytes": need})
                    if self._inbox.get().kind != "go":
                        raise Abandoned
                    room.open(need)
                    with results_in(room.empty):
                        answer = answer.run()
                if answer.recording is not None:
                    self.tell("recording", body=to_body(answer.recording, SAFETENSORS, "recording"))
                if answer.last is not None:
                    self.tell("last", {"tokens": answer.tokens}, [answer.last])
                if answer.reply is not None:
                    places, inline = room.leave(to_body(answer.reply, SAFETENSORS, "reply"))
                    self.tell("reply", {"places": places}, inline)
        except Exception as fault:
            self.tell("problem", problem_of(fault))
            model.recover(fault)

    def _emit(self, event: bytes) -> None:
        self.tell("event", body=[event])

    def tell(self, kind: str, facts: dict[str, Any] | None = None, body: Sequence[Piece] = ()) -> None:
        """Send a message."""
        for piece in pieces_of(kind, facts, body):
            view = memoryview(piece)
            while view:
                view = view[self._sink.write(view) :]


def _end_with_server() -> None:
    """Have the system end this process with the thread that started it, also while it is stopped. On Linux alone."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _held_after_giving_back() -> int:
    give_back_freed_memory()
    return private_bytes()


def problem_of(fault: Exception) -> dict[str, Any]:
    """Return the problem document of a fault, with ``traceback`` for the server's log if nobody expects it."""
    if isinstance(fault, AttentionError):
        return fault.to_problem()
    if isinstance(fault, Abandoned):
        return AttentionError("nobody waits for it").to_problem()
    if is_out_of_memory(fault):
        return NeverFits("the device ran out of memory after all; ask for less at a time").to_problem()
    told = f"{type(fault).__name__}: {fault}"[:500]
    problem = InternalError(f"the model failed ({told}); the server's log has the cause").to_problem()
    return problem | {"traceback": "".join(traceback.format_exception(fault))}


def serve(load: Load, warm: Callable[[], None] = lambda: None) -> None:
    """Serve a model over standard input and output; what libraries print goes to standard error.

    ``warm`` is called in a spare process, and imports what a load would.
    """
    _end_with_server()
    keep_freed_memory()
    source, sink = FileIO(os.dup(0), "r"), FileIO(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    Worker(source, sink).serve(load, warm)

"""The process of one model, as the server sees it: started, spoken to, watched, ended.

transformers computes all of a model but its attention. It takes seconds to import, and memory that no plan counts, so
it never enters the server's process.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from asyncio import create_subprocess_exec
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from typing import Any, Final

import psutil

from attention_contract.errors import AttentionError, ModelEnded, OverBudget
from attention_service.models.model_catalogue import PROCESS_BYTES
from attention_service.models.server.reply_memories import ReplyMemories
from attention_service.models.worker_messages import Message, Piece, pieces_of, read_message
from attention_service.runtime.device.cpu_threads import sleep_while_waiting
from attention_service.runtime.device.freed_memory import MUCH, private_bytes

log = logging.getLogger(__name__)
COMMAND: Final = (sys.executable, "-P", "-m", "attention_service.models.process")
"""``-P``: no Python file of the folder in which the server was started is imported."""
_MARGIN: Final = 1.2
"""Memory that a process may take, as a multiple of its estimate, before it is ended."""
_LOOK_S: Final = 0.1
"""Seconds between two looks at a process of which somebody waits for a message."""
_REST_S: Final = 10.0
"""The same of one that nobody waits for, and that computes nothing."""
_TOLD_AFTER: Final = 0.25
"""Share of the patience after which it is told that a process stands still."""
_GRACE_S: Final = 2.0
"""Seconds that a process has to end by itself."""
_TOLD: Final = 4096
"""Bytes of the last words of a process that are kept."""
_PASSED: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH")
"""Variables that the process is given: none with a secret."""
_PREFIXES: Final = ("CUDA_", "GOMP_", "KMP_", "LD_", "MKL_", "NVIDIA_", "OMP_", "PYTORCH_")
"""Beginnings of others: of CUDA, threads, PyTorch's memory, and where libraries are found."""


class WorkerProcess:
    """A process that holds one model. Used from the event loop only."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        source: FileIO,
        limit: int,
        memories: ReplyMemories,
        patience_s: float,
        *,
        watched: bool,
    ) -> None:
        self.memories = memories
        """The memories of its replies; none on a GPU."""
        self.limit = limit
        """Bytes of memory by the estimate, without that of replies, which is admitted before it is there.

        A process that takes ``_MARGIN`` times as many is ended.
        """
        self._own_bytes = 0
        """Bytes of its own after its imports; 0 before it has told them."""
        self._process = process
        self._incoming: asyncio.Queue[Message | None] = asyncio.Queue()
        self._has_ended = False
        self._told = b""
        self._outgrown = 0
        self._asked = False
        """True while somebody waits for what it says next."""
        self._awaited = asyncio.Event()
        """Set when somebody begins to wait."""
        self._idle_s = 0.0
        """Seconds for which it has used no processor although somebody waits."""
        self._patience_s = patience_s
        loop = asyncio.get_running_loop()
        # A thread reads: the event loop would copy a large reply twice, in pieces of 64 KiB.
        threading.Thread(target=self._listen, args=(source, loop), name="attention-model", daemon=True).start()
        self._tasks = [
            asyncio.create_task(self._keep_last_words()),
            asyncio.create_task(self._watch(memory=watched)),
        ]

    @classmethod
    async def start(cls, limit: int, patience_s: float, *, watched: bool) -> "WorkerProcess":
        """Start a process that may take so many bytes of memory by the estimate.

        ``patience_s``: seconds without progress after which it is ended. ``watched``: end it if it takes more memory.
        False for a model on a GPU, which tells what it holds there.
        """
        memories = ReplyMemories.make() if watched else ReplyMemories([])
        reading, writing = os.pipe()
        try:
            process = await create_subprocess_exec(
                *COMMAND,
                env=_environment(),
                stdin=asyncio.subprocess.PIPE,
                stdout=writing,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=memories.files,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return cls(process, FileIO(reading, "r"), limit, memories, patience_s, watched=watched)

    @property
    def is_alive(self) -> bool:
        """True until the process closes its output, as it does at its end."""
        return not self._has_ended

    @property
    def unforeseen_bytes(self) -> int:
        """Bytes of the process without a model beyond their estimate, as of a PyTorch with more libraries."""
        return max(self._own_bytes + MUCH - PROCESS_BYTES, 0)

    @property
    def stands_s(self) -> float:
        """Seconds for which it stands still, computing nothing although it is asked; 0 if these are few."""
        return self._idle_s if self._asked and self._idle_s > _TOLD_AFTER * self._patience_s else 0.0

    async def send(self, kind: str, facts: dict[str, Any] | None = None, body: Sequence[Piece] = ()) -> None:
        """Send a message. That a process has ended is told by ``receive``."""
        if self._process.stdin is not None:
            with suppress(ConnectionError, RuntimeError):
                self._process.stdin.writelines(pieces_of(kind, facts, body))
                await self._process.stdin.drain()

    async def receive(self) -> Message:
        """Wait for a message. Raises OverBudget if the process was ended for its memory, and ModelEnded otherwise."""
        self._asked = True
        self._awaited.set()
        try:
            message = await self._incoming.get()
        finally:
            self._asked = False
        if message is None:
            self._incoming.put_nowait(None)
            raise await self._end_of_process()
        if (cause := message.facts.pop("traceback", None)) is not None:
            log.error("a model failed: %s", cause)
        return message

    def kill(self) -> None:
        """End the process at once."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def end(self) -> None:
        """End the process, and wait until its memory is free."""
        self.memories.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(_GRACE_S):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            self.kill()
        await self._process.wait()
        for task in self._tasks:
            task.cancel()

    async def _end_of_process(self) -> AttentionError:
        code = await self._process.wait()
        if self._outgrown:
            allowed = int(_MARGIN * self.limit)
            return OverBudget(
                f"the model took {self._outgrown} bytes, where {self.limit} were estimated and {allowed} are allowed; "
                "its process was ended. Ask for less at a time",
                needed_bytes=self._outgrown,
                limit_bytes=allowed,
            )
        if self._idle_s > self._patience_s:
            return ModelEnded(
                f"the process of the model computed nothing for {self._idle_s:.0f} s, and {self._patience_s:g} s are "
                "allowed (stuck_seconds); it was ended, and the next request starts it again"
            )
        with suppress(asyncio.CancelledError):
            await asyncio.wait(self._tasks[:1], timeout=_GRACE_S)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        words = self._told.decode("utf-8", "replace")
        log.warning("the process of a model ended %s: %s", how, words)
        return ModelEnded(f"the process of the model ended {how}; the next request starts it again")

    def _listen(self, source: FileIO, loop: asyncio.AbstractEventLoop) -> None:
        """Take in messages, and None after the last."""
        with source, suppress(RuntimeError):  # the loop was closed
            while (message := read_message(source)) is not None:
                loop.call_soon_threadsafe(self._take_in, message)
            loop.call_soon_threadsafe(self._take_in, None)

    def _take_in(self, message: Message | None) -> None:
        self._has_ended = message is None
        if message is not None and message.kind == "started":
            self._own_bytes = message.facts["own_bytes"]
        else:
            self._incoming.put_nowait(message)

    async def _keep_last_words(self) -> None:
        if self._process.stderr is not None:
            while part := await self._process.stderr.read(_TOLD):
                self._told = (self._told + part)[-_TOLD:]

    async def _watch(self, *, memory: bool) -> None:
        """End the process once it holds much more than was estimated, or stands still for too long.

        Progress is time of a processor, however little: a computation of hours is never taken for a standstill.
        """
        with suppress(psutil.NoSuchProcess):
            seen = psutil.Process(self._process.pid)
            used, moved = 0.0, time.monotonic()
            while self._idle_s <= self._patience_s:
                if memory and (taken := private_bytes(seen)) > _MARGIN * self.limit:
                    self._outgrown = taken
                    break
                before, used, now = used, sum(seen.cpu_times()[:2]), time.monotonic()
                moved = now if used > before or not self._asked else moved
                self._idle_s = now - moved
                if not self._asked and used == before:
                    self._awaited.clear()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._awaited.wait(), _REST_S)
                    moved = time.monotonic()
                await asyncio.sleep(_LOOK_S)
            self.kill()


def _environment() -> dict[str, str]:
    passed = {name: value for name, value in os.environ.items() if name in _PASSED or name.startswith(_PREFIXES)}
    sleep_while_waiting(passed)
    return passed | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

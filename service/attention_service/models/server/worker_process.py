"""The process of one model, as the server sees it: started, spoken to, watched, ended.

transformers computes all of a model but its attention. It takes seconds to import, and memory that no plan counts, so
it never enters the server's process.
"""

import asyncio
import itertools
import logging
import os
import signal
import sys
import threading
import time
from asyncio import create_subprocess_exec
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from typing import Any, Final, NamedTuple

import psutil

from attention_contract.errors import AttentionError, ModelEnded, OverBudget, from_problem
from attention_service.models.folders.model_catalogue import PROCESS_BYTES
from attention_service.models.server.exchange import Exchange
from attention_service.models.server.reply_memories import ReplyMemories
from attention_service.models.worker_messages import SPREAD, Piece, WorkerMessage, pieces_of, read_message
from attention_service.runtime.device.cpu_threads import SLEEPING, waiting_of_models
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
_OF_WAITING: Final = 0.05
"""Share of a processor up to which the processes of a spread model only look whether others have come on."""
_NOTICE_AFTER: Final = 0.25
"""Share of the patience after which it is told that a process stands still."""
_GRACE_S: Final = 2.0
"""Seconds that a process has to end by itself."""
STOP_S: Final = 5.0
"""Seconds that a process has to stop work that nobody waits for, or to say anything meanwhile, before it is ended."""
_MOST_ERRORS: Final = 4096
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
        spread: bool,
    ) -> None:
        self.memories = memories
        """The memories of its replies; none on a GPU."""
        self.limit = limit
        """Bytes of memory by the estimate, without that of replies, which is admitted before it is there.

        A process that takes ``_MARGIN`` times as many is ended.
        """
        self._own_bytes = 0
        """Bytes of its own after its imports; 0 before it has told them."""
        self._process, self._spread = process, spread
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done once the process has closed its output, as it does at its end."""
        self._loading = Exchange(self, 0)
        """The messages of the load, which have no number."""
        self._exchanges: dict[int, Exchange] = {}
        """The requests under way, by their numbers."""
        self._numbers = itertools.count(1)
        self._errors = b""
        self._outgrown: _Outgrown | None = None
        self._is_logged = False
        self._waiters = 0
        """The number of tasks that wait for what it says next."""
        self._awaited = asyncio.Event()
        """Set when somebody begins to wait."""
        self._heard = self._pass_ends = 0.0
        """Time of its last message, and of the predicted end of the pass that this message told of."""
        self._idle_s = 0.0
        """Seconds for which it has used no processor although somebody waits."""
        self._patience_s = patience_s
        # A thread reads: the event loop would copy a large reply twice, in pieces of 64 KiB.
        threading.Thread(target=self._listen, args=(source, loop), name="attention-model", daemon=True).start()
        self._tasks = [
            asyncio.create_task(self._keep_last_words()),
            asyncio.create_task(self._watch(memory=watched)),
        ]

    @classmethod
    async def start(
        cls, limit: int, patience_s: float, *, watched: bool, devices: int = 1
    ) -> "WorkerProcess":  # fmt: skip
        """Start a process that may take so many bytes of memory by the estimate.

        ``patience_s``: seconds without progress after which it is ended. ``watched``: end it if it takes more memory.
        False for a model on a GPU, which tells what it holds there. ``devices``: those of its model; it starts a
        process for each further one, which ends with it, and counts with it.
        """
        memories, spread = ReplyMemories.make() if watched else ReplyMemories([]), devices > 1
        reading, writing = os.pipe()
        try:
            process = await create_subprocess_exec(
                *COMMAND,
                *((SPREAD, str(devices)) if spread else ()),
                env=_environment() | (_of_group(gpus=not watched) if spread else {}),
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
        return cls(process, FileIO(reading, "r"), limit, memories, patience_s, watched=watched, spread=spread)

    @property
    def is_alive(self) -> bool:
        """True until the process closes its output, as it does at its end."""
        return not self.ended.done()

    @property
    def unforeseen_bytes(self) -> int:
        """Bytes of the process without a model beyond their estimate, as of a PyTorch with more libraries."""
        return max(self._own_bytes + MUCH - PROCESS_BYTES, 0)

    @property
    def stands_s(self) -> float:
        """Seconds for which it stands still, computing nothing although it is asked; 0 if these are few."""
        return self._idle_s if self._waiters and self._idle_s > _NOTICE_AFTER * self._patience_s else 0.0

    async def load(self, facts: dict[str, Any], progress: Callable[[float], None]) -> dict[str, Any]:
        """Have it load its model, and return what it tells of it. Raises what the load does, and ``fault``."""
        await self.send("load", facts)
        while (message := await self._loading.receive()).kind != "loaded":
            if message.kind == "problem":
                raise from_problem(message.facts["status"], message.facts)
            progress(message.facts["share"])
        return message.facts

    @contextmanager
    def exchange(self) -> Iterator[Exchange]:
        """Give a request a number, by which the process and the server speak of it while the block runs."""
        made = Exchange(self, next(self._numbers))
        self._exchanges[made.number] = made
        if self.ended.done():  # since the request was given to it
            made.put(None)
        try:
            yield made
        finally:
            made.allow(0)
            del self._exchanges[made.number]

    async def send(self, kind: str, facts: dict[str, Any] | None = None, body: Sequence[Piece] = ()) -> None:
        """Send a message. That a process has ended is told by ``Exchange.receive``."""
        if self._process.stdin is not None:
            with suppress(ConnectionError, RuntimeError):
                self._process.stdin.writelines(pieces_of(kind, facts, body))
                await self._process.stdin.drain()

    async def kill_if_silent(self) -> None:
        """Wait until nothing came for a while, beyond the end of an announced pass, and end the process."""
        since = time.monotonic()
        while (rest := max(since, self._heard, self._pass_ends) + STOP_S - time.monotonic()) > 0:
            await asyncio.sleep(rest)
        self.kill()

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
        if self._spread:  # the others hold its standard error until they have ended too
            await asyncio.wait(self._tasks[:1], timeout=_GRACE_S)
        for task in self._tasks:
            task.cancel()

    async def fault(self) -> AttentionError:
        """Wait for the end of the process, and return the reason: OverBudget if it took too much, or ModelEnded."""
        code = await self._process.wait()
        if self._outgrown is not None:
            return self._outgrown.fault()
        if self._idle_s > self._patience_s:
            return ModelEnded(
                f"the process of the model computed nothing for {self._idle_s:.0f} s, and {self._patience_s:g} s are "
                "allowed (stuck_seconds); it was ended, and the next request starts it again"
            )
        with suppress(asyncio.CancelledError):
            await asyncio.wait(self._tasks[:1], timeout=_GRACE_S)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        words = self._errors.decode("utf-8", "replace")
        if not self._is_logged:
            self._is_logged = True
            log.warning("the process of a model ended %s: %s", how, words)
        return ModelEnded(f"the process of the model ended {how}; the next request starts it again")

    def await_more(self, more: int) -> None:
        """Note that somebody more, or less, waits for what the process says next."""
        self._waiters += more
        if more > 0:
            self._awaited.set()

    def _listen(self, source: FileIO, loop: asyncio.AbstractEventLoop) -> None:
        """Take in messages, and None after the last."""
        with source, suppress(RuntimeError):  # the loop was closed
            while (message := read_message(source)) is not None:
                loop.call_soon_threadsafe(self._take_in, message)
            loop.call_soon_threadsafe(self._take_in, None)

    def _take_in(self, message: WorkerMessage | None) -> None:
        self._heard = self._pass_ends = time.monotonic()
        if message is None:
            self.ended.set_result(None)
            for inbox in (self._loading, *self._exchanges.values()):
                inbox.put(None)
        elif message.kind == "started":
            self._own_bytes = message.facts["own_bytes"]
        elif message.kind == "pass":
            self._pass_ends += message.facts["seconds"]
        elif (number := message.facts.pop("request", None)) is None:
            self._loading.put(message)
        elif (exchange := self._exchanges.get(number)) is not None:
            exchange.put(message)

    async def _keep_last_words(self) -> None:
        if self._process.stderr is not None:
            while part := await self._process.stderr.read(_MOST_ERRORS):
                self._errors = (self._errors + part)[-_MOST_ERRORS:]

    async def _watch(self, *, memory: bool) -> None:
        """End the process once it holds much more than was estimated, or stands still for too long.

        Progress is time of a processor, however little: a computation of hours is never taken for a standstill.
        """
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self._process.pid)
            used, moved = 0.0, time.monotonic()
            least = _OF_WAITING if self._spread else 0.0
            while self._idle_s <= self._patience_s:
                seen = [first, *first.children()] if self._spread else [first]
                if memory and (taken := sum(map(private_bytes, seen))) > _MARGIN * self.limit:
                    self._outgrown = _Outgrown(
                        taken, self.limit, sum(exchange.runs for exchange in self._exchanges.values())
                    )
                    break
                taken_s, now = sum(sum(one.cpu_times()[:2]) for one in seen), time.monotonic()
                computes = taken_s - used > least * (now - moved)
                if computes or not self._waiters:
                    used, moved = taken_s, now
                self._idle_s = now - moved
                if not self._waiters and not computes:
                    self._awaited.clear()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._awaited.wait(), _REST_S)
                    moved = time.monotonic()
                await asyncio.sleep(_LOOK_S)
            self.kill()


class _Outgrown(NamedTuple):
    """A process that took too much."""

    taken: int
    estimated: int
    requests: int
    """Requests that ran."""

    def fault(self) -> AttentionError:
        """Return OverBudget if one request ran, and otherwise ModelEnded, since nobody knows whose fault it was."""
        allowed = int(_MARGIN * self.estimated)
        message = (
            f"the model took {self.taken} bytes, where {self.estimated} were estimated and {allowed} are allowed; its "
            "process was ended"
        )
        if self.requests > 1:
            return ModelEnded(f"{message} with {self.requests} requests. Send yours again, or ask for less at a time")
        return OverBudget(f"{message}. Ask for less at a time", needed_bytes=self.taken, limit_bytes=allowed)


def _of_group(*, gpus: bool) -> dict[str, str]:
    """Variables of processes that take the same steps; ``gpus``: on GPUs, which transformers takes if it sees any."""
    return {"PYTHONHASHSEED": "0"} | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})


def _environment() -> dict[str, str]:
    passed = {name: value for name, value in os.environ.items() if name in _PASSED or name.startswith(_PREFIXES)}
    waiting = waiting_of_models(os.environ)
    for name in SLEEPING.keys() - waiting.keys():
        passed.pop(name, None)
    return passed | waiting | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

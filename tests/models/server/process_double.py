"""A process of a model that answers in the same turn of the event loop, or when a test says so."""

import asyncio
import itertools
from pathlib import Path

from attention_contract.errors import ModelEnded
from attention_service.models.folders.model_catalogue import ModelFolder
from attention_service.models.server.exchange import Exchange
from attention_service.models.server.reply_memories import ReplyMemories
from attention_service.models.server.worker_process import WorkerProcess
from attention_service.models.worker_messages import WorkerMessage
from attention_service.modules.checkpoints.forms.form import Facts, Form

FOLDER = ModelFolder("one", Path("one"), Form(Facts({})), 0, 0, 0, None)


class ProcessDouble(WorkerProcess):
    """A process that answers in the same turn; a request tells of its memory twice, as one with images does."""

    holds = False
    """True if requests that were admitted end by ``finish`` alone, or when they are cancelled."""

    def __init__(self):
        self.limit = self._own_bytes = self._idle_s = self._waiters = 0
        self._awaited, self._patience_s = asyncio.Event(), 60
        self.ended = asyncio.get_running_loop().create_future()
        self.memories = ReplyMemories([])
        self._numbers, self._exchanges, self._loading = itertools.count(1), {}, Exchange(self, 0)
        self._needs = {}

    @classmethod
    async def start(cls, *_, **__):
        await asyncio.sleep(0)
        return cls()

    async def send(self, kind, facts, _=()):
        if self.ended.done():
            return
        number = facts.get("request")
        if kind == "load":
            self._tell("progress", share=0.5)
            self._tell("loaded", held_bytes=None)
        elif kind == "ask":
            self._needs[number] = [30, 20, 10]
            self._tell("need", request=number, bytes=10)
        elif number in self._needs:  # others come too late
            self._needs[number] = self._needs[number][:-1] if kind == "go" else []
            if self._needs[number]:
                self._tell("need", request=number, bytes=self._needs[number][-1])
            elif kind == "cancel" or not self.holds:
                self.finish(number)
        await asyncio.sleep(0)

    def finish(self, number):
        """Be done with a request."""
        del self._needs[number]
        self._tell("done", request=number, held_bytes=None, adapter_bytes={})

    @property
    def admitted(self):
        """The numbers of the requests that run."""
        return [number for number, needs in self._needs.items() if not needs]

    def _tell(self, kind, **facts):
        self._take_in(WorkerMessage(kind, facts, memoryview(b"")))

    async def end(self):
        await asyncio.sleep(0)

    async def fault(self):
        return ModelEnded("killed")

    def kill(self):
        if not self.ended.done():
            self._take_in(None)


async def turns(number):
    for _ in range(number):
        await asyncio.sleep(0)

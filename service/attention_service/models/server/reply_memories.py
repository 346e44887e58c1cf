"""The memories in which one process leaves its replies: taken by a request, free once its reply is sent."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Self

from attention_service.models.reply_memory import ReplyMemory

COUNT: Final = 4
"""Memories of one process."""
_KEEP_S: Final = 5.0
"""Seconds for which the pages of a memory are kept for the next reply."""


class ReplyMemories:
    """The memories of one process. Used from the event loop only.

    A memory is taken by a request, then lent with its reply, then free. The pages of a free one are kept for a while.
    """

    def __init__(self, memories: list[ReplyMemory]) -> None:
        self.on_kept: Callable[[int], None] = lambda _: None
        """Called with the bytes that are kept for the next replies, when they change."""
        self._memories = memories
        self._taken: set[ReplyMemory] = set()
        self._kept = 0
        self._used = 0.0
        """Loop time of the last use."""
        self._giving_back: asyncio.TimerHandle | None = None

    @classmethod
    def make(cls) -> Self:
        """Make those of a new process; none where the system has no files without names, or allows none."""
        loop = asyncio.get_running_loop()

        def freed() -> None:  # in whichever thread let go of the reply last
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(made.note)

        made = cls([])
        with suppress(AttributeError, OSError):
            made._memories = [ReplyMemory(freed) for _ in range(COUNT)]
        return made

    @property
    def files(self) -> list[int]:
        """The files of the memories, in the order by which messages name them."""
        return [memory.file for memory in self._memories]

    def take(self) -> tuple[int, ReplyMemory] | None:
        """Take a free memory, and return its number too; None if there is none."""
        for number, memory in enumerate(self._memories):
            if memory.is_free and memory not in self._taken:
                self._taken.add(memory)
                self.note()
                return number, memory
        return None

    def leave(self, memory: ReplyMemory) -> None:
        """End what ``take`` began. The memory is free at once unless a reply lies in it."""
        self._taken.discard(memory)
        self.note()

    def note(self) -> None:
        """Count what is kept by now."""
        kept = sum([memory.bytes for memory in self._free()])
        loop = asyncio.get_running_loop()
        self._used = loop.time()
        if kept and self._giving_back is None:
            self._giving_back = loop.call_later(_KEEP_S, self._give_back_later)
        if kept != self._kept:
            self._kept = kept
            self.on_kept(kept)

    def give_back(self) -> None:
        """Free the pages that are kept."""
        for memory in self._free():
            memory.cut(0)
        self.note()

    def close(self) -> None:
        """Give all up, once the process has ended."""
        self.on_kept = lambda _: None
        for memory in self._memories:
            memory.close()
        self._memories = []
        if self._giving_back is not None:
            self._giving_back.cancel()

    def _free(self) -> list[ReplyMemory]:
        return [memory for memory in self._memories if memory.is_free and memory not in self._taken]

    def _give_back_later(self) -> None:
        self._giving_back = None
        loop = asyncio.get_running_loop()
        rest = self._used + _KEEP_S - loop.time()
        if rest > 0:
            self._giving_back = loop.call_later(rest, self._give_back_later)
        else:
            self.give_back()

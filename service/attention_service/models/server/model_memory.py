"""The memory that the processes of whole models hold. The budget asks this one owner what of it could be freed."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from attention_service.runtime.scheduling.budget import Budget


class ModelMemory:
    """Bytes that models and the spare process hold of a budget, and those of them that could be freed.

    The counts change when a process holds more or less, when requests begin or end to use it, and when memory is kept
    for replies or given back. Between these events nothing is counted.
    """

    def __init__(self, budget: Budget) -> None:
        self.bytes = 0
        """Bytes that all processes hold."""
        self.reclaimable = 0
        """Bytes among these of processes that nobody uses or that end, and bytes that others keep for replies."""
        self.budget = budget
        self._shares: set[MemoryShare] = set()
        budget.models = self

    @property
    def used(self) -> int:
        """Bytes of models that answer requests. They can be freed once these have their answers."""
        return self.bytes - self.reclaimable

    @property
    def held_by(self) -> str:
        """The models that answer requests, with the bytes that they hold, the largest first."""
        used = sorted(
            (share for share in self._shares if not share.is_unused and share.name), key=lambda share: -share.bytes
        )
        return ", ".join(f"{share.name} ({share.bytes} bytes)" for share in used)

    def reclaim(self, need: int) -> None:
        """Free what is kept for replies, then end the spare process and the least recently used models for so much."""
        need -= sum(share.bytes if share.ends else share.kept for share in self._shares)
        for share in list(self._shares):
            share.give_back()
        for share in sorted(self._shares, key=lambda share: (not share.first, share.last_use)):
            if need <= 0:
                return
            if share.is_unused:
                need -= share.bytes
                share.ends = True
                share.give_way()

    def count(self, share: "MemoryShare", held: int, reclaimable: int) -> None:
        """Note what one process holds from now on, and admit requests that fit by now."""
        more, free = held - share.bytes, reclaimable - share.reclaimable
        if not more and not free:
            return
        self.bytes += more
        self.reclaimable += free
        share.bytes, share.reclaimable = held, reclaimable
        (self._shares.add if held else self._shares.discard)(share)
        if more < 0 or free > 0:
            self.budget.wake()


class MemoryShare:
    """The memory of one process."""

    def __init__(
        self,
        memory: ModelMemory,
        give_way: Callable[[], None],
        give_back: Callable[[], None] = lambda: None,
        *,
        first: bool = False,
        name: str = "",
    ) -> None:
        """``give_way`` ends the process soon. ``give_back`` frees what it keeps for replies.

        ``first``: give way before others, not in the order of the last use. ``name``: of its model.
        """
        self.name = name
        self.give_way = give_way
        self.give_back = give_back
        self.first = first
        self.last_use = time.monotonic()
        self.own = 0
        """Bytes that it holds besides its adapters, and what is kept for replies."""
        self.adapters: Mapping[str, int] = {}
        """Bytes of its adapters by name, on a CPU; those on a GPU are among its own."""
        self.kept = 0
        """Bytes of memory that is kept for the next replies."""
        self.ends = False
        """True once the process is on its way to its end."""
        self.bytes = self.reclaimable = 0
        """Bytes that it holds in all, and those that could be freed, as ``ModelMemory`` counts them."""
        self._memory = memory
        self._users = 0

    @property
    def is_unused(self) -> bool:
        """True if no request uses the process, and it is not ending."""
        return not self._users and not self.ends

    def hold(self, own: int) -> None:
        """Note how many bytes the process holds from now on."""
        self.own = own
        self._count()

    def hold_adapters(self, adapters: Mapping[str, int]) -> None:
        """Note which adapters it has from now on, and their bytes."""
        self.adapters = adapters
        self._count()

    def keep(self, kept: int) -> None:
        """Note how many bytes are kept for the next replies from now on."""
        self.kept = kept
        self._count()

    def end(self) -> None:
        """Note that the process ends, so that its memory is free soon."""
        self.ends = True
        self._count()

    def drop(self) -> None:
        """Note that the process has ended and holds nothing."""
        self.own, self.adapters, self.kept, self.ends = 0, {}, 0, False
        self._count()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the process from giving way while the block runs."""
        self._users += 1
        self._count()
        try:
            yield
        finally:
            self._users -= 1
            self.last_use = time.monotonic()
            self._count()

    def _count(self) -> None:
        held = self.own + sum(self.adapters.values()) + self.kept
        self._memory.count(self, held, held if self.ends or not self._users else self.kept)

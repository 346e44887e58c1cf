"""The forward passes that wait for their backward pass, each held for a while and only as long as there is room.

A pass belongs to its caller: for anyone else there is none with its id.

Used from the event loop only.
"""

import asyncio
import secrets
from collections import Counter
from typing import Final

from attention_contract.errors import PassNotFound
from attention_service.runtime.callers import caller
from attention_service.runtime.operations.kept_backward import KeptPass
from attention_service.runtime.scheduling.budget import Budget

SHARE: Final = 0.25
"""The largest part of the memory budget that kept passes have together."""
LONGEST_S: Final = 600.0
"""Seconds after which a pass is dropped."""


class KeptPasses:
    """Kept passes by id. The oldest of whoever holds the most are dropped where their memory is needed."""

    def __init__(self, budget: Budget) -> None:
        self.bytes = 0
        """Bound of the bytes that all of them hold."""
        self._budget = budget
        self._limit = int(SHARE * budget.total)
        self._kept: dict[str, tuple[KeptPass, str, asyncio.TimerHandle]] = {}
        """Each with the name of its caller and the timer of its end."""

    def keep(self, kept: KeptPass) -> str | None:
        """Keep a pass and return its id; None where there is no room for it."""
        need = kept.plan.peak_bytes
        if need > min(self._limit, self._budget.unclaimed):
            return None
        while self.bytes + need > self._limit:
            self._drop_one()
        name = secrets.token_hex(16)
        timer = asyncio.get_running_loop().call_later(LONGEST_S, self.drop, name)
        self._kept[name] = kept, caller.get().name, timer
        self.bytes += need
        self._budget.trim = self.trim
        self.trim()
        return name

    def get(self, name: str) -> KeptPass:
        """The pass with this id. Raises PassNotFound."""
        kept, owner, _ = self._kept.get(name, (None, None, None))
        if kept is None or owner != caller.get().name:
            raise PassNotFound(
                f"no pass {name[:80]!r} is kept: its backward pass ran already, it is older than {LONGEST_S:.0f} s, or "
                "its memory was needed; send gradients with the inputs"
            )
        return kept

    def drop(self, name: str) -> None:
        """Give a pass up."""
        kept, _, timer = self._kept.pop(name)
        timer.cancel()
        self.bytes -= kept.plan.peak_bytes
        if not self._kept:
            self._budget.trim = None

    def drop_of(self, module: str) -> None:
        """Give up the passes of a module, which is deleted or gets other parameters."""
        for name, (kept, *_) in list(self._kept.items()):
            if kept.bound.module is not None and kept.bound.module.name == module:
                self.drop(name)

    def trim(self) -> None:
        """Give passes up until the others fit into what is free."""
        while self._kept and self.bytes > self._budget.available:
            self._drop_one()

    def _drop_one(self) -> None:
        """Give up the oldest pass of the caller who holds the most, so that nobody pushes out those of others."""
        held: Counter[str] = Counter()
        for kept, owner, _ in self._kept.values():
            held[owner] += kept.plan.peak_bytes
        ((most, _),) = held.most_common(1)
        self.drop(next(name for name, (_, owner, _) in self._kept.items() if owner == most))

    def clear(self) -> None:
        """Give all of them up."""
        for name in list(self._kept):
            self.drop(name)

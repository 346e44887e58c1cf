"""Resident memory within the budget: freed memory goes back to the system, at once if it is too much."""

import asyncio
import resource
import time
from contextlib import suppress
from typing import Final

import structlog

from attention_service.engine import Engine
from attention_service.runtime.device.freed_memory import MUCH, give_back_freed_memory
from attention_service.runtime.scheduling.budget import Budget
from attention_service.runtime.ticks import to_tick

_STATM: Final = "/proc/self/statm"
_PAGE_BYTES: Final = resource.getpagesize()
_LOOK_S: Final = 0.25
"""Seconds between two looks, while requests hold memory or freed memory waits to go back; otherwise a tick."""
_REST_S: Final = 5.0
"""Seconds for which freed memory is kept for later requests, and until the attempt after one that freed little."""
_LITTLE: Final = 2**24
_TOLERATED: Final = 0.25
"""Share of the budget by which the process may exceed it. Estimates cover tensors, not what allocators keep beside."""
_TOLERATED_BYTES: Final = 2**28
"""Bytes by which it may exceed it at least."""
_PINNED_KEPT: Final = 2**28
"""Bytes of pinned memory that are kept for the next copies to and from a GPU."""
log = structlog.get_logger(__name__)


def resident_bytes() -> int:
    """Bytes of this process that are in memory; 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError), open(_STATM, "rb", buffering=0) as facts:
        return int(facts.read().split()[1]) * _PAGE_BYTES
    return 0


class Unused:
    """Tells when the process has held much more than requests use for a while: what they used has been freed since."""

    def __init__(self, resident: int) -> None:
        self._least = resident
        """Bytes in memory when all that was freed had gone back."""
        self._since: float | None = None

    def is_due(self, resident: int, used: int, now: float) -> bool:
        """Return True if freed memory is to go back. ``used``: bytes of requests and replies under way."""
        self._least = min(self._least, resident)
        if resident - used <= self._least + MUCH:
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None and now - self._since >= _REST_S

    @property
    def is_waiting(self) -> bool:
        """True while freed memory waits to go back."""
        return self._since is not None

    def went_back(self, resident: int) -> None:
        """Note what is in memory now that it has."""
        self._least, self._since = resident, None


async def keep_within_budget(engine: Engine) -> None:
    """Watch resident memory until cancelled, from a moment at which no request runs.

    The C library keeps freed memory for the next tensors. It gives that back when nobody used it for a while, and when
    the process exceeds its own memory and the budget together, which beside a GPU is the host's. If the process exceeds
    them by far even then, kept passes are given up, and the budget admits no work until the memory is back. Unused
    pinned memory goes back before that.
    """
    budget, shared = engine.host, engine.host is engine.budget
    own = resident_bytes() - (engine.library.resident_bytes if shared else 0)
    tolerated = max(int(_TOLERATED * budget.total), _TOLERATED_BYTES)
    unused = Unused(resident_bytes())
    while True:
        used = budget.in_flight + budget.bodies + budget.replies
        await asyncio.sleep(_LOOK_S if used or unused.is_waiting or budget.exceeded else to_tick())
        if not shared:
            await asyncio.to_thread(engine.device.look_at_pinned, _PINNED_KEPT)
            budget.wake()  # there may be room now
        before = resident_bytes()
        if before <= own + budget.total:
            _note(budget, 0)
            if unused.is_due(before, budget.in_flight + budget.bodies + budget.replies, time.monotonic()):
                await asyncio.to_thread(give_back_freed_memory)
                unused.went_back(resident_bytes())
            continue
        if shared and before > own + budget.total + tolerated:
            engine.passes.clear()
        await asyncio.to_thread(give_back_freed_memory)
        after = resident_bytes()
        unused.went_back(after)
        beyond = after - own - budget.total
        # Memory that is still used falls slowly: what was refused is let in again at half of what is tolerated.
        _note(budget, beyond if beyond > tolerated / (2 if budget.exceeded else 1) else 0)
        if before - after < _LITTLE and not budget.exceeded:
            await asyncio.sleep(_REST_S)


def _note(budget: Budget, exceeded: int) -> None:
    """Set what the process holds beyond the budget, and log that it began or ended."""
    changed, budget.exceeded = bool(exceeded) != bool(budget.exceeded), exceeded
    if not changed:
        return
    log.warning("no work begins: too much memory" if exceeded else "work begins again", bytes_beyond=exceeded)
    if not exceeded:
        budget.wake()
        if budget.released is not None:
            budget.released()  # those at the entrance too

"""Resident memory within the budget: memory that was freed goes back to the system when the process holds too much."""

import asyncio
import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

from attention_service.runtime.device import give_back_freed_memory
from attention_service.runtime.engine import Engine

_STATM: Final = Path("/proc/self/statm")
_LOOK_S: Final = 0.25
_REST_S: Final = 5.0
"""Seconds until the next attempt after one that freed little."""
_LITTLE: Final = 2**24


def resident_bytes() -> int:
    """Bytes of this process that are in memory; 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    return 0


async def keep_within_budget(engine: Engine) -> None:
    """Watch resident memory until cancelled, from a moment at which no request runs.

    The C library keeps freed memory for the next tensors. It gives that back when the process exceeds its own memory
    and the budget together.
    """
    own = resident_bytes() - engine.library.resident_bytes
    while True:
        await asyncio.sleep(_LOOK_S)
        before = resident_bytes()
        if before > own + engine.budget.total:
            await asyncio.to_thread(give_back_freed_memory)
            if before - resident_bytes() < _LITTLE:
                await asyncio.sleep(_REST_S)

"""Moments at which the periodic looks of a server happen together, so that an idle one wakes once a second for them."""

import asyncio
from typing import Final

TICK_S: Final = 1.0


def to_tick() -> float:
    """Return the seconds until the next tick: a whole second of the event loop's clock."""
    return TICK_S - asyncio.get_running_loop().time() % TICK_S

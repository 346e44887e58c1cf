"""Observations of requests: noted while a request is answered, digested in bulk a moment later."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

NotedT = TypeVar("NotedT")

AFTER_S = 0.1
"""The longest time that an observation waits."""
MOST = 32
"""Observations that are digested at a time: more would delay a request."""


class Later(Generic[NotedT]):
    """Passes observations on in bulk, in their order. Used from the event loop only."""

    def __init__(self, see_to: Callable[[list[NotedT]], None]) -> None:
        self._see_to = see_to
        self._noted: list[NotedT] = []
        self._timer: asyncio.TimerHandle | None = None

    def note(self, noted: NotedT) -> None:
        """Add an observation."""
        self._noted.append(noted)
        if len(self._noted) >= MOST:
            self.settle()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(AFTER_S, self.settle)

    def settle(self) -> None:
        """Pass all observations on now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        noted, self._noted = self._noted, []
        if noted:
            self._see_to(noted)

"""What is noted of a request while it is answered, and seen to afterwards: many at a time cost little each."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

NotedT = TypeVar("NotedT")

AFTER_S = 0.1
"""Seconds that something may wait to be seen to."""
MOST = 32
"""How much is noted before it is seen to all the same: more at a time would keep somebody waiting."""


class Later(Generic[NotedT]):
    """Hands on what was noted, in its order: a moment later, or when somebody asks. Used from the event loop only."""

    def __init__(self, see_to: Callable[[list[NotedT]], None]) -> None:
        self._see_to = see_to
        self._noted: list[NotedT] = []
        self._timer: asyncio.TimerHandle | None = None

    def note(self, noted: NotedT) -> None:
        """Remember something for a moment."""
        self._noted.append(noted)
        if len(self._noted) >= MOST:
            self.settle()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(AFTER_S, self.settle)

    def settle(self) -> None:
        """See to all that was noted."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        noted, self._noted = self._noted, []
        if noted:
            self._see_to(noted)

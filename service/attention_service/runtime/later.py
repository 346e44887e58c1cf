"""What is noted of a request while it is answered, and seen to afterwards: many at a time cost little each."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

NotedT = TypeVar("NotedT")

AFTER_S = 0.1
"""Seconds that something may wait to be seen to."""


class Later(Generic[NotedT]):
    """Hands on what was noted, in its order: a moment later, or when somebody asks. Used from the event loop only."""

    def __init__(self, see_to: Callable[[list[NotedT]], None]) -> None:
        self._see_to = see_to
        self._noted: list[NotedT] = []

    def note(self, noted: NotedT) -> None:
        """Remember something for a moment."""
        if not self._noted:
            asyncio.get_running_loop().call_later(AFTER_S, self.settle)
        self._noted.append(noted)

    def settle(self) -> None:
        """See to all that was noted."""
        noted, self._noted = self._noted, []
        if noted:
            self._see_to(noted)

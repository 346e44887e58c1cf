"""The end of a server that nobody asks."""

import time
from collections.abc import Callable


class IdleExit:
    """Tells when a server has had no request for so long that it is to stop."""

    def __init__(self, limit_s: float, running: Callable[[], int]) -> None:
        """``running``: the number of works that run beside requests, such as downloads."""
        self.limit_s = limit_s
        self._running = running
        self._answered = 0
        self._since = time.monotonic()

    def has_come(self, answered: int, under_way: int) -> bool:
        """Return True if it is to stop. ``answered``: the requests since the start; ``under_way``: those that run."""
        now = time.monotonic()
        if answered != self._answered or under_way or self._running():
            self._answered, self._since = answered, now
        return now - self._since >= self.limit_s

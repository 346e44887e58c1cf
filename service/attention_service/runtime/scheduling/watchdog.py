"""The watchdog: it knows what each thread works at, and since when there was no progress."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from attention_contract.errors import Stuck
from attention_service.core.cancellation import Cancellation

_SLACK: Final = 10
"""Work may take this many times as long as it was predicted to take."""


@dataclass(eq=False, slots=True)
class Work:
    """Work of a thread that has begun."""

    name: str
    cancellation: Cancellation
    expected_s: float = 0.0
    """The upper bound of its predicted time; 0 for work without a prediction."""
    began: float = field(default_factory=time.monotonic)


PATIENCE_S: Final = 120.0
"""Seconds without progress after which work is stuck, unless a setting says otherwise."""


class Watchdog:
    """Tells whether any thread makes no progress. Threads may call it at once."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._works: set[Work] = set()

    @contextmanager
    def watching(self, name: str, cancellation: Cancellation, expected_s: float = 0.0) -> Iterator[None]:
        """Watch the work of the block, which makes progress at each checkpoint of its cancellation."""
        work = Work(name, cancellation, expected_s)
        self._works.add(work)
        try:
            yield
        finally:
            self._works.discard(work)

    def check(self) -> None:
        """Raise Stuck if work makes no progress for longer than the patience."""
        now = time.monotonic()
        for work in tuple(self._works):
            idle = now - max(work.began, work.cancellation.seen)
            if idle > max(self._patience_s, _SLACK * work.expected_s):
                raise Stuck(
                    f"{work.name} has made no progress for {idle:.0f} s, and {self._patience_s:g} s are allowed; "
                    "restart the server if it does not recover"
                )

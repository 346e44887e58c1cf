"""The one cache of plans: a bucket of sizes is planned once for as long as the same clock predicts."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Final, TypeVar

from attention_service.cost import Clock

ValueT = TypeVar("ValueT")

MOST: Final = 4096
"""Entries that are kept; the least recently used go first."""


class PlanCache:
    """Remembers what was planned by one clock. Threads may share it."""

    def __init__(self, *, by_bucket: bool = True) -> None:
        """``by_bucket=False``: plan the exact sizes of every request."""
        self.by_bucket = by_bucket
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()
        self._clock: Clock | None = None
        self._changing = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, clock: Clock, key: Hashable, make: Callable[[], ValueT]) -> ValueT:
        """The entry of this key, made now unless it was before. What ``make`` raises is not remembered."""
        entry: ValueT | None = self.find(clock, key)
        if entry is None:
            entry = make()
            self.keep(clock, key, entry)
        return entry

    def find(self, clock: Clock, key: Hashable) -> Any:
        """The entry of this key; None if there is none."""
        with self._changing:
            if clock is not self._clock:
                self._entries.clear()
                self._clock = clock
            entry = self._entries.get(key)
            if entry is not None and len(self._entries) > MOST // 2:  # otherwise nothing goes soon
                self._entries.move_to_end(key)
            return entry

    def keep(self, clock: Clock, key: Hashable, entry: Any) -> None:
        """Remember an entry."""
        with self._changing:
            if clock is self._clock:  # another clock may have been set meanwhile
                self._entries[key] = entry
                if len(self._entries) > MOST:
                    self._entries.popitem(last=False)

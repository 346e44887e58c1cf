"""Plans that were made: the same request, by its sizes, is planned once."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

from attention_service.cost import Clock

PlanT = TypeVar("PlanT")

MOST = 4096
"""The plans that are kept; those that were not asked for the longest go first."""


class Plans(Generic[PlanT]):
    """Remembers plans for as long as the same clock predicts. Threads may share it."""

    def __init__(self) -> None:
        self._made: OrderedDict[Hashable, PlanT] = OrderedDict()
        self._clock: Clock | None = None
        self._changing = Lock()

    def __len__(self) -> int:
        return len(self._made)

    def get(self, clock: Clock, key: Hashable, make: Callable[[], PlanT]) -> PlanT:
        """The plan of this key, made now unless it was before. What ``make`` raises is not remembered."""
        with self._changing:
            if clock is not self._clock:
                self._made.clear()
                self._clock = clock
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
        made = make()
        with self._changing:
            if clock is self._clock:  # another may have been set since
                self._made[key] = made
                if len(self._made) > MOST:
                    self._made.popitem(last=False)
        return made

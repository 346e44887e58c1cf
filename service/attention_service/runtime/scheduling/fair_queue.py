"""A queue in which several callers get equal shares, so that nobody waits for all of another's requests."""

from collections.abc import Container, Iterable, Iterator
from typing import Final, Generic, Protocol, TypeVar

_REMEMBERED: Final = 1024
"""Callers beyond which those are forgotten who are owed nothing and owe nothing."""


class Waiter(Protocol):
    """A request that waits. It has a caller, and is equal to itself alone."""

    @property
    def caller(self) -> str:
        """The name of the caller."""


ItemT = TypeVar("ItemT", bound=Waiter)


class FairQueue(Generic[ItemT]):
    """Start-time fair queueing of a resource (Goyal, Vin and Cheng 1996, section 2).

    The requests of one caller begin in the order of their arrival. Of several callers the next one is who used the
    least of the resource while the others waited.
    """

    def __init__(self) -> None:
        self.size = 0
        """The number of requests that wait."""
        self._lines: dict[str, dict[ItemT, None]] = {}
        self._tags: dict[str, float] = {}
        """The start tag of each caller's next request."""
        self._now = 0.0
        """The start tag of the last request that began."""

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        return self.size

    def __iter__(self) -> Iterator[ItemT]:
        """All that wait, each caller's in the order of their arrival."""
        for line in self._lines.values():
            yield from line

    def __contains__(self, item: ItemT) -> bool:
        """Return True if this request waits."""
        return item in self._lines.get(item.caller, ())

    @property
    def callers(self) -> int:
        """The number of callers of whom a request waits."""
        return len(self._lines)

    def has_other(self, barred: Container[str]) -> bool:
        """Return True if a request of a caller waits who is not ``barred``."""
        return any(name not in barred for name in self._lines)

    def count(self, caller: str) -> int:
        """Return the number of requests of one caller that wait."""
        return len(self._lines.get(caller, ()))

    def add(self, item: ItemT) -> None:
        """Put a request behind the others of its caller."""
        line = self._lines.get(item.caller)
        if line is None:
            line = self._lines[item.caller] = {}
            self._tags[item.caller] = max(self._tags.get(item.caller, 0.0), self._now)
        line[item] = None
        self.size += 1

    def first(self, barred: Container[str] = ()) -> ItemT:
        """Return the request that is next. There must be one of a caller who is not ``barred``."""
        return next(iter(self.line(barred)))

    def line(self, barred: Container[str] = ()) -> Iterable[ItemT]:
        """Return all requests of the caller who is next, in the order of their arrival."""
        one = len(self._lines) == 1
        lines = [name for name in self._lines if name not in barred] if barred else self._lines
        return self._lines[next(iter(lines)) if one else min(lines, key=self._tags.__getitem__)]

    def used(self, callers: Iterable[str]) -> float:
        """Return what those of these callers used who used the least, as ``use`` counts it."""
        return min(self._tags.get(name, self._now) for name in callers)

    def by_share(self) -> list[ItemT]:
        """All that wait, those of the caller first who is next."""
        lines = sorted(self._lines, key=self._tags.__getitem__)
        return [item for caller in lines for item in self._lines[caller]]

    def use(self, item: ItemT, amount: float) -> None:
        """Note how much of the resource a request has used, which may go on waiting."""
        self.use_of(item.caller, amount)

    def use_of(self, caller: str, amount: float) -> None:
        """Note how much of the resource a caller has used."""
        tag = self._tags.get(caller, self._now)
        self._now = max(self._now, tag)
        self._tags[caller] = tag + amount
        if len(self._tags) > _REMEMBERED:
            waits = self._lines.keys()
            self._tags = {name: tag for name, tag in self._tags.items() if tag > self._now or name in waits}

    def begin(self, item: ItemT, amount: float) -> None:
        """Take out a request that begins, and note how much of the resource it needs."""
        self.use(item, amount)
        self.remove(item)

    def discard(self, item: ItemT) -> None:
        """Take out a request if it waits."""
        if item in self:
            self.remove(item)

    def remove(self, item: ItemT) -> None:
        """Take out a request that ends before it began."""
        line = self._lines[item.caller]
        del line[item]
        self.size -= 1
        if not line:
            del self._lines[item.caller]

"""A memory budget: the bytes that resident modules and running requests may hold together.

A GPU has memory of its own. Beside one there are two budgets: the device's, of modules, sessions and running requests,
and the host's, of bodies, results, replies, pictures and recordings. On a CPU one budget holds everything.

Used from the event loop only, so its counts need no lock.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from attention_contract.errors import AttentionError, NeverFits, NoRoom, OverBudget, Overloaded
from attention_service.runtime.callers import caller
from attention_service.runtime.scheduling.fair_queue import FairQueue

RefusalT = TypeVar("RefusalT", bound=AttentionError)
UNCOUNTED: Final = 32 * 1024
"""Bytes of a body, or of a reply that is being sent, up to which it is not counted."""


@dataclass(frozen=True)
class Words:
    """The words of a budget's refusals."""

    place: str = "the device"
    """The owner of the memory."""
    setting: str = "memory_budget"
    beside: str = "the resident modules"
    """The name of all that takes a part of it for as long as it stays."""
    remedy: str = "Ask for less at a time, delete modules, or raise the memory budget"


OF_HOST: Final = Words(
    "the host", "host_memory_budget", "pinned memory", "Ask for less at a time, or raise host_memory_budget"
)
REQUEST: Final = "the request needs an estimated {need} bytes at its peak"
FEWER: Final = "Ask for fewer queries, heads or taps at a time"


class Reclaimable(Protocol):
    """Resident memory that is freed for requests. Its owner calls ``Budget.wake`` when there is less of it."""

    @property
    def reclaimable(self) -> int:
        """Bytes that ``reclaim`` can free."""

    @property
    def used(self) -> int:
        """Bytes that can be freed once requests that use them have their answers."""

    def reclaim(self, need: int) -> None:
        """Have so many bytes freed, if there are."""


class NothingReclaimable:
    """No memory that could be freed."""

    reclaimable = used = 0

    def reclaim(self, need: int) -> None:
        """Free nothing."""


@dataclass(eq=False, slots=True)
class _Turn:
    """A request that waits for memory."""

    need: int
    caller: str
    done: "asyncio.Future[None]"


class Budget:
    """Admits work that fits, queues work that could fit later, and refuses work that never fits."""

    def __init__(
        self,
        total: int,
        device_bytes: int,
        resident_bytes: Callable[[], int],
        max_waiting: int,
        words: Words = Words(),
    ) -> None:
        """``total``: the bytes that may be held; ``device_bytes``: those that there are, on the device or the host."""
        self.total = total
        self._words = words
        self.device_bytes = device_bytes
        self.in_flight = 0
        self.bodies = 0
        """Bytes of the bodies that are being read, decoded or answered."""
        self.replies = 0
        """Bytes of the replies that are being sent."""
        self.inputs = 0
        """Bytes of the inputs that are kept for further requests."""
        codes = (NeverFits.code, OverBudget.code, Overloaded.code, NoRoom.code)
        self.exceeded = 0
        """Bytes that the process holds beyond the budget although freed memory went back to the system; 0 if none.

        No work begins meanwhile.
        """
        self.refused: Counter[str] = Counter(dict.fromkeys(codes, 0))
        """Refused requests, by the error's code."""
        self.trim: Callable[[], None] | None = None
        """Called when bytes were taken; gives up what is kept only while there is room. None if nothing is kept."""
        self.released: Callable[[], None] | None = None
        """Called when a request no longer waits or computes. None if nobody waits for that."""
        self.models: Reclaimable = NothingReclaimable()
        """The resident memory that could be freed for a request: that of whole models."""
        self._resident_bytes = resident_bytes
        self._max_waiting = max_waiting
        self._waiting: FairQueue[_Turn] = FairQueue()
        self._admitted = 0

    @property
    def waiting(self) -> int:
        """Requests that wait for memory or for the device."""
        return self._waiting.size + max(self._admitted - 1, 0)

    @property
    def open_slots(self) -> int:
        """Requests that may come to wait beside those that do."""
        return 0 if self.exceeded else max(self._max_waiting - self.waiting, 0)

    @property
    def is_full(self) -> bool:
        """True if as many requests wait as may, or no work may begin."""
        return self._waiting.size + max(self._admitted - 1, 0) >= self._max_waiting or bool(self.exceeded)

    @property
    def capacity(self) -> int:
        """Bytes that are free with nothing else in flight."""
        return min(max(self._limit(), 0), self.device_bytes)

    @property
    def available(self) -> int:
        """Bytes that could be admitted now."""
        return max(self._free(), 0)

    @property
    def unclaimed(self) -> int:
        """Bytes that could be admitted now, and for which nobody waits."""
        return 0 if self._waiting.size else self.available

    def _free(self) -> int:
        """Bytes that nothing holds but bodies; below 0 if more is held than there is."""
        return self.total - self._resident_bytes() - self.inputs - self.in_flight - self.replies

    def _limit(self) -> int:
        """Bytes of the budget that are not held for good."""
        return self.total - self._resident_bytes() - self.inputs + self.models.reclaimable

    def check(self, need: int, what: str = REQUEST, advice: str = FEWER, *, own: int = 0) -> None:
        """Raise NeverFits or OverBudget if this many bytes do not fit even with nothing else in flight.

        Raises Overloaded if they fit once whole models have answered. ``own``: bytes of the model that asks.
        """
        if need > self.device_bytes:
            raise self._refusal(
                NeverFits(
                    f"{what.format(need=need)}; {self._words.place} has {self.device_bytes} in all. {advice}",
                    needed_bytes=need,
                    limit_bytes=self.device_bytes,
                )
            )
        limit = self._limit()
        if need <= limit:
            return
        used = self.models.used - own
        left = max(limit, 0)
        detail = f"{what.format(need=need)}; the budget of {self.total} leaves {left}"
        if need <= limit + used:
            detail += f" while whole models that hold {used} answer requests; try again in a moment"
            raise self._refusal(Overloaded(detail, needed_bytes=need, limit_bytes=left))
        detail += f" beside {self._words.beside}. {self._words.remedy}"
        raise self._refusal(OverBudget(detail, needed_bytes=need, limit_bytes=left))

    def take(self, need: int) -> bool:
        """Take bytes at once, to be given back by ``release``. False if they are not free, or others wait."""
        if self._waiting.size or self.exceeded or self._admitted > self._max_waiting:
            return False
        return self._take_if_free(need)

    def _take_if_free(self, need: int) -> bool:
        """Take bytes that are free beside bodies and replies, or beside replies if nothing else was admitted."""
        if need > min(self._free() - (self.bodies if self._admitted else 0), self.device_bytes):
            return False
        self.in_flight += need
        self._admitted += 1
        if self.trim is not None:
            self.trim()
        return True

    async def acquire(self, need: int, of: str | None = None) -> None:
        """Take this many bytes of the budget, to be given back by ``release``; wait for them if they are not free.

        ``of``: the name of the caller; by default the one whose request this is.

        Requests of one caller are admitted in the order of their arrival; several callers get the same share of the
        memory. Raises NeverFits, OverBudget, or Overloaded where too many wait already.
        """
        if self.take(need):
            return
        self.check(need)
        if self.is_full:
            raise self.crowded()
        await self._turn(need, caller.get().name if of is None else of)

    def crowded(self) -> AttentionError:
        """The refusal of one request more than may wait."""
        if self.exceeded:
            return self._refusal(
                NoRoom(
                    f"the server holds {self.exceeded} bytes more than {self._words.setting} allows, and begins no "
                    "work until it has given them back; try again in a moment",
                    actual=self.exceeded,
                    limit_bytes=self.total,
                )
            )
        return self._refusal(
            Overloaded(
                f"{self.waiting} requests already wait, and the limit is {self._max_waiting}; try again in a moment",
                limit=self._max_waiting,
            )
        )

    def release(self, need: int) -> None:
        """Give back what ``acquire`` took."""
        self.in_flight -= need
        self._admitted -= 1
        if self._waiting.size:
            self.wake()
        if self.released is not None:
            self.released()

    @asynccontextmanager
    async def holding(self, need: int) -> AsyncIterator[None]:
        """Hold this many bytes while the block runs. Raises what ``acquire`` raises."""
        await self.acquire(need)
        try:
            yield
        finally:
            self.release(need)

    def take_more(self, more: int) -> None:
        """Take what is ``unclaimed``, for requests that were admitted, to be given back by ``release_more``."""
        self.in_flight += more
        if self.trim is not None:
            self.trim()

    def release_more(self, more: int) -> None:
        """Give back what ``take_more`` took."""
        self.in_flight -= more
        self.wake()

    def check_body(self, held: int, more: int) -> None:
        """Raise unless a body that holds so many bytes can have so many more.

        NeverFits or OverBudget where it alone is more than there is, and Overloaded where bodies and replies are more
        than half of the room together.
        """
        self.check(held + more, "the body needs at least {need} bytes", "Send less at a time")
        limit = self.capacity // 2
        if self.bodies > held and self.bodies + self.replies + more > limit:
            raise self._refusal(
                Overloaded(
                    f"bodies and replies of {self.bodies + self.replies - held} bytes are being read or sent, and this "
                    f"body has at least {held + more}; together they may have {limit}, half of what "
                    f"{self._words.setting} leaves beside {self._words.beside}; try again in a moment",
                    limit_bytes=limit,
                )
            )

    def check_reply(self, more: int, *, held: int = 0) -> None:
        """Raise NoRoom unless this many bytes of a reply, which holds others already, can wait for its reader.

        Callers who read slowly keep memory from computations, so their replies may take half of the room, or one
        reply more than that.
        """
        limit = self.capacity // 2
        if self.replies > held and self.replies + more > limit:
            raise self._refusal(
                NoRoom(
                    f"replies of {self.replies - held} bytes wait for their readers, and this one has {held + more}; "
                    f"together they may have {limit}, half of what {self._words.setting} leaves beside "
                    f"{self._words.beside}. Try again in a moment, or ask for less at a time",
                    limit_bytes=limit,
                    needed_bytes=self.replies + more,
                )
            )

    def _refusal(self, error: RefusalT) -> RefusalT:
        self.refused[error.code] += 1
        return error

    async def _turn(self, need: int, of: str) -> None:
        """Wait until these bytes have been taken for a caller, who is first in line then."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        turn = _Turn(need, of, done)
        self._waiting.add(turn)
        self._reclaim(need)
        try:
            await done
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self.wake()  # those behind it may fit
                if self.released is not None:
                    self.released()
            elif not done.cancelled() and done.exception() is None:  # woken and cancelled at once
                self.release(need)
            raise

    def _reclaim(self, need: int) -> None:
        if need > self.available:
            self.models.reclaim(need - self.available)

    def wake(self) -> None:
        """Admit, in order, those that fit by now; to be called when memory was freed that no request held."""
        while self._waiting.size:
            turn = self._waiting.first()
            if turn.done.done():
                self._waiting.remove(turn)
                continue
            try:
                self.check(turn.need)  # modules may have come to stay while it waited
            except (NeverFits, OverBudget, Overloaded) as refusal:
                self._waiting.remove(turn)
                turn.done.set_exception(refusal)
                continue
            if not self._take_if_free(turn.need):
                if not self._admitted:  # nobody else gives memory back, and models may have become unused since
                    self._reclaim(turn.need)
                return
            self._waiting.begin(turn, turn.need)
            turn.done.set_result(None)


class BodyMemory:
    """The memory of one body, taken as it comes, and then of the reply to it; to be given back at the end.

    Bodies do not wait, and one computation at a time goes on beside them: callers who send slowly stop nobody.
    """

    __slots__ = ("_budget", "_held", "_reply")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._held = self._reply = 0

    def give_back(self) -> None:
        """Give back all that was taken."""
        if not self._held and not self._reply:
            return
        self._budget.bodies -= self._held
        self._budget.replies -= self._reply
        self._held = self._reply = 0
        self._budget.wake()

    def expect(self, size: int) -> None:
        """Raise what ``Budget.check_body`` does for a body of this many bytes in all, without taking them."""
        self._budget.check_body(0, size)

    def hold(self, more: int) -> None:
        """Take this many more bytes. Raises what ``Budget.check_body`` does."""
        self._budget.check_body(self._held, more)
        self._held += more
        self._budget.bodies += more

    def become_reply(self, size: int) -> None:
        """Give the body back, and take this many bytes for a reply until it is sent. Raises NoRoom."""
        self.give_back()
        self._budget.check_reply(size)
        self._reply = size
        self._budget.replies += size

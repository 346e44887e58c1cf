"""Room for pages: the share of the memory budget that sessions may take, and who leaves when it is short."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from attention_contract.errors import OverBudget, Overloaded
from attention_service.core.kv_cache.pages import PagePool
from attention_service.core.kv_cache.slab import PageKind, Slab
from attention_service.runtime.callers import caller
from attention_service.runtime.scheduling.budget import Budget
from attention_service.runtime.sessions.decode_session import DecodeSession, page_kind


@dataclass
class SessionTotals:
    """Sums of what sessions hold, kept up to date by ``count``."""

    of_owner: Counter[str] = field(default_factory=Counter)
    """Bytes of each caller's sessions."""
    pinned: int = 0
    """Bytes of pinned sessions."""

    def count(self, session: DecodeSession) -> None:
        """Take up what a session holds now."""
        now = session.bytes
        more, session.counted = now - session.counted, now
        self.of_owner[session.owner] += more
        if not self.of_owner[session.owner]:
            del self.of_owner[session.owner]
        if session.pinned:
            self.pinned += more


@dataclass(eq=False)
class PageBudget:
    """Finds room for pages within a limit, and evicts the least recently used sessions that are idle."""

    pool: PagePool
    budget: Budget
    limit: int
    """Bytes that pages may take."""
    pinned_limit: int
    """Bytes that pages of pinned sessions may take."""
    totals: SessionTotals
    sessions: Callable[[], Iterable[DecodeSession]]
    evict: Callable[[DecodeSession], None]

    def reserve(self, session: DecodeSession, tokens: int, source: DecodeSession | None = None) -> None:
        """Take the pages for this many more tokens of each sequence of a session.

        Evicts others but ``source``. Raises OverBudget if the limit is too small, Overloaded if others hold too much or
        the device has no memory.
        Nothing is taken then.
        """
        tables, pages = session.all_tables, 0
        for table in tables:
            pages += table.missing(tokens)
        if not pages:
            return
        kind = page_kind(session.module)
        need = pages * kind.page_bytes
        self.totals.count(session)
        self._check(session, need, tokens)
        if self._short(kind, need):
            self._evict(session, source, need)
        try:
            for table in tables:
                table.reserve(tokens)
        except torch.OutOfMemoryError:  # who else uses the GPU is in no budget
            for table in tables:
                table.trim()
            raise Overloaded(
                f"the device has no memory for {need} bytes of pages, although the budget has; try again in a moment",
                needed_bytes=need,
            ) from None
        finally:
            self.totals.count(session)

    def _check(self, session: DecodeSession, need: int, tokens: int) -> None:
        if (most := min(self.limit, self.budget.total)) < need:
            raise OverBudget(
                f"{tokens} more tokens of {len(session.tables)} sequences need {need} bytes of pages; sessions may "
                f"take {most} in all. Send fewer, or let the operator raise ATTENTION_SESSION_SHARE",
                needed_bytes=need,
                limit_bytes=most,
            )
        asks = caller.get()
        if asks.limits.session_bytes is not None:
            own = self.totals.of_owner[asks.name]
            asks.check("session_bytes", own + need, f"your sessions hold {own} bytes, and need {need} more; end some")
        if session.pinned:
            pinned = self.totals.pinned
            if pinned + need > self.pinned_limit:
                raise Overloaded(
                    f"pinned sessions hold {pinned} bytes and may hold {self.pinned_limit}; {need} more do not fit. "
                    "Open the session without pinned, or end one that is pinned",
                    needed_bytes=need,
                    limit_bytes=self.pinned_limit,
                )

    def _short(self, kind: PageKind, need: int, leaving: "_Leaving | None" = None) -> bool:
        """True if bytes of pages lack room, even if some sessions leave."""
        pages, memory = (leaving.pages, leaving.memory) if leaving is not None else (0, 0)
        free = self.budget.available + self.pool.spare_bytes(kind) + memory
        return self.pool.bytes - pages + need > self.limit or need > free

    def _evict(self, session: DecodeSession, source: DecodeSession | None, need: int) -> None:
        """Evict as few idle sessions as give enough room, the least recently used first.

        Raises Overloaded, and evicts none, if all of them are too few.
        """
        idle = [
            idle_session
            for idle_session in self.sessions()
            if idle_session not in {session, source} and not idle_session.pinned and not idle_session.turn.locked()
        ]
        idle.sort(key=lambda idle_session: idle_session.used_at, reverse=True)
        kind = page_kind(session.module)
        leaving, chosen = _Leaving(kind), list[DecodeSession]()
        while idle and self._short(kind, need, leaving):
            chosen.append(idle.pop())
            leaving.change(chosen[-1], -1)
        if not self._short(kind, need, leaving):
            for leaving_session in reversed(chosen.copy()):  # some free nothing, or too little to matter
                leaving.change(leaving_session, 1)
                if self._short(kind, need, leaving):
                    leaving.change(leaving_session, -1)
                else:
                    chosen.remove(leaving_session)
            for leaving_session in chosen:
                self.evict(leaving_session)
        if self._short(kind, need):
            raise Overloaded(
                f"{need} bytes of pages do not fit beside the {self.pool.bytes} that sessions hold now; try again in "
                "a moment, or end sessions that are not needed",
                needed_bytes=need,
                limit_bytes=self.limit,
            )


class _Leaving:
    """The bytes that would be free without some sessions: a page that others use stays."""

    def __init__(self, kind: PageKind) -> None:
        """``kind``: that of the pages that are wanted."""
        self._kind = kind
        self.pages = 0
        """Bytes of pages."""
        self.memory = 0
        """Bytes of memory."""
        self._users: dict[Slab, NDArray[np.int32]] = {}

    def change(self, session: DecodeSession, users: int) -> None:
        """Count so many users more of a session's pages."""
        for run in session.runs:
            slab = run.slab
            if slab not in self._users:
                self._users[slab] = slab.users.copy()
            counted, around = self._users[slab], slab.around(run.first, run.stop)
            pages, grains = counted[run.first : run.stop], np.count_nonzero(slab.grains(counted[around]))
            used = np.count_nonzero(pages)
            pages += users
            grains -= np.count_nonzero(slab.grains(counted[around]))
            freed = int(used - np.count_nonzero(pages)) * slab.kind.page_bytes
            self.pages += freed
            # In slabs that take their memory at once, pages of the same kind serve where they are.
            in_place = slab.kind == self._kind and not slab.kind.is_mapped
            self.memory += freed if in_place else int(grains) * slab.grain_bytes


def due(sessions: Iterable[DecodeSession]) -> list[DecodeSession]:
    """The idle sessions that have expired."""
    now = time.monotonic()
    return [session for session in sessions if session.expires <= now and not session.turn.locked()]

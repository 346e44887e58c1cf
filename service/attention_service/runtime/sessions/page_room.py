"""Room for pages: the share of the memory budget that sessions may take, and who leaves when it is short."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from attention_contract.errors import OverBudget, Overloaded
from attention_service.runtime.callers import caller
from attention_service.runtime.scheduling.budget import Budget
from attention_service.runtime.sessions.decode_session import DecodeSession, page_kind
from attention_service.runtime.sessions.pages import PagePool


@dataclass(eq=False)
class PageRoom:
    """Finds room for pages within a limit, and evicts the least recently used sessions that are idle."""

    pool: PagePool
    budget: Budget
    limit: int
    """Bytes that pages may take."""
    pinned_limit: int
    """Bytes that pages of pinned sessions may take."""
    sessions: Callable[[], Iterable[DecodeSession]]
    evict: Callable[[DecodeSession], None]

    def reserve(self, session: DecodeSession, tokens: int, source: DecodeSession | None = None) -> None:
        """Take the pages for this many more tokens of each sequence of a session.

        Evicts others but ``source``. Raises OverBudget if the limit is too small, Overloaded if others hold too much.
        Nothing is taken then.
        """
        pages = sum(table.missing(tokens) for table in session.all_tables)
        need = pages * page_kind(session.module).page_bytes
        if not need:
            return
        self._check(session, need, tokens)
        if self._short(need):
            self._evict(session, source, need)
        for table in session.all_tables:
            table.reserve(tokens)

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
            own = sum(each.bytes for each in {session, *self.sessions()} if each.owner == asks.name)
            asks.check("session_bytes", own + need, f"your sessions hold {own} bytes, and need {need} more; end some")
        if session.pinned:
            pinned = sum(each.bytes for each in self.sessions() if each.pinned)
            if pinned + need > self.pinned_limit:
                raise Overloaded(
                    f"pinned sessions hold {pinned} bytes and may hold {self.pinned_limit}; {need} more do not fit. "
                    "Open the session without pinned, or end one that is pinned",
                    needed_bytes=need,
                    limit_bytes=self.pinned_limit,
                )

    def _short(self, need: int) -> bool:
        return self.pool.bytes + need > self.limit or need > self.budget.free

    def _evict(self, session: DecodeSession, source: DecodeSession | None, need: int) -> None:
        """Evict idle sessions, the least recently used first; none if all are too few. Raises Overloaded then."""
        idle = [
            each
            for each in self.sessions()
            if each not in {session, source} and not each.pinned and not each.turn.locked()
        ]
        idle.sort(key=lambda each: each.used_at, reverse=True)
        most = sum(each.bytes for each in idle)
        enough = self.pool.bytes + need - most <= self.limit and need <= self.budget.free + most
        while enough and idle and self._short(need):
            self.evict(idle.pop())
        if self._short(need):
            raise Overloaded(
                f"{need} bytes of pages do not fit beside the {self.pool.bytes} that sessions hold now; try again in "
                "a moment, or end sessions that are not needed",
                needed_bytes=need,
                limit_bytes=self.limit,
            )


def due(sessions: Iterable[DecodeSession]) -> list[DecodeSession]:
    """The idle sessions that have expired."""
    now = time.monotonic()
    return [session for session in sessions if session.expires <= now and not session.turn.locked()]

"""The registry of live sessions: their ids, whose turn it is, and how each ends."""

import asyncio
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from typing import TypeVar

from attention_contract.errors import Overloaded, SessionGone, SessionNotFound
from attention_service.modules.resident import Module
from attention_service.runtime.callers import caller
from attention_service.runtime.sessions.decode_session import DecodeSession
from attention_service.runtime.sessions.page_budget import SessionTotals, due

KeyT = TypeVar("KeyT")
_REMEMBERED = 65_536
"""Sessions whose end is remembered; after that a session is one that never was."""
_SWEEP_S = 1.0
"""Seconds between two looks for sessions that have expired."""
_RUN_BYTES, _ID_BYTES = 4, 8


class SessionRegistry:
    """Live sessions by id. Used from the event loop only."""

    def __init__(
        self, check_ready: Callable[[], None], freed: Callable[[], None], most: int = 4096, *, siblings: bool = False
    ) -> None:
        """``check_ready`` raises unless work is taken; ``freed`` is called when pages may have been freed.

        ``most``: the number of sessions that may live at a time. ``siblings``: other processes have sessions too.
        """
        self.counts: Counter[str] = Counter(
            dict.fromkeys(("opened", "deleted", "expired", "evicted", "steps", "tokens"), 0)
        )
        """Events since the start."""
        self.reply_bytes = 0
        """Bytes of the replies that are kept."""
        self.totals = SessionTotals()
        self._check_ready = check_ready
        self._freed = freed
        self._most = most
        self._lost = "elsewhere_or_gone" if siblings else "restarted"
        self._live: dict[str, DecodeSession] = {}
        self._owners: Counter[str] = Counter()
        """The number of live sessions of each caller."""
        self.modules: Counter[Module] = Counter()
        """The modules that sessions keep, some at versions that were replaced, with the number of live sessions."""
        self._ended: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """The reason why each of these sessions is gone, and its owner."""
        self._run = secrets.token_hex(_RUN_BYTES)
        """Begins the ids of this run of the server, so that those of a former one are known."""
        self._sweep: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._live)

    @property
    def live(self) -> Collection[DecodeSession]:
        """Every live session, the oldest first."""
        return self._live.values()

    def new_id(self) -> str:
        """An id that nobody can guess. Raises Overloaded if there are too many sessions."""
        if len(self._live) >= self._most:
            self.expire()
        if len(self._live) >= self._most:
            raise Overloaded(
                f"the server has {len(self._live)} sessions; max_sessions allows {self._most}. Delete those that "
                "are not needed",
                limit=self._most,
                actual=len(self._live) + 1,
            )
        asks = caller.get()
        own = self._owners[asks.name]
        asks.check("sessions", own + 1, f"{own} live sessions are yours; delete those that are not needed")
        return f"{self._run}-{secrets.token_hex(_ID_BYTES)}"

    def add(self, session: DecodeSession) -> DecodeSession:
        """Make a session live."""
        self._live[session.id] = session
        self._owners[session.owner] += 1
        self.modules[session.module] += 1
        self.totals.count(session)
        self.counts["opened"] += 1
        session.serial = self.counts["opened"]
        session.touch()
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(_SWEEP_S, self._look)
        return session

    def of_caller(self) -> int:
        """Number of live sessions that the caller may use."""
        asks = caller.get()
        return len(self._live) if asks.manages else self._owners[asks.name]

    def page(self, after: int, limit: int) -> tuple[list[DecodeSession], bool]:
        """The caller's first sessions after one of this serial number. True if there are more."""
        self.expire()
        asks = caller.get()
        later = (session for session in self._live.values() if session.serial > after and asks.may_use(session.owner))
        sessions = list(islice(later, limit + 1))
        return sessions[:limit], len(sessions) > limit

    def stop(self) -> None:
        """Look for expired sessions no more."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def get(self, id: str) -> DecodeSession:  # noqa: A002
        """The live session of this id, if it is the caller's. Raises SessionGone and SessionNotFound."""
        if (session := self._live.get(id)) is not None and caller.get().may_use(session.owner):
            if session.expires > time.monotonic() or session.turn.locked():
                return session
            self.end(session, "expired")
        run, dash, number = id.partition("-")
        reason, owner = self._ended.get(id, (None, ""))
        if reason is not None and not caller.get().may_use(owner):
            reason = None
        if reason is None and dash and len(run) == 2 * _RUN_BYTES and len(number) == 2 * _ID_BYTES and run != self._run:
            reason = self._lost
        if reason is None:
            raise SessionNotFound(f"there is no session {id[:64]!r}; open one", param="session")
        raise _gone(id, reason)

    @asynccontextmanager
    async def turn(self, id: str) -> AsyncIterator[DecodeSession]:  # noqa: A002
        """Let one request at a time read or change a session, in the order of arrival.

        The turn ends when the block does, or when the last job of a caller who left has ended.
        """
        self._check_ready()
        session = self.get(id)
        await session.turn.acquire()
        try:
            if session.gone is not None:
                raise _gone(id, session.gone)
            yield session
        finally:
            if session.running is None or session.running.over:
                self._leave(session)
            else:
                session.running.then = partial(self._leave, session)

    def _leave(self, session: DecodeSession) -> None:
        """End a turn: give back what a failed step left, and the pages of a session that is gone."""
        session.running = None
        session.touch()
        for table in session.all_tables:
            table.trim((session.capacity or 0) - table.tokens)
        session.turn.release()
        if session.gone is not None:
            session.clear()
        self.totals.count(session)

    def _look(self) -> None:
        """End what has expired, and look again while there are sessions."""
        self._sweep = None
        self.expire()
        if self._live:
            self._sweep = asyncio.get_running_loop().call_later(_SWEEP_S, self._look)

    def clear(self, session: DecodeSession) -> None:
        """Give back the pages of a session that is gone, or that is not to be opened."""
        session.clear()
        self.totals.count(session)

    def forget_reply(self, session: DecodeSession) -> None:
        """Keep the reply to a session's last step no longer."""
        self.reply_bytes -= session.reply_bytes
        session.reply, session.reply_bytes = None, 0

    def expire(self) -> None:
        """End the sessions that have expired."""
        for session in due(self._live.values()):
            self.end(session, "expired")

    def end(self, session: DecodeSession, reason: str) -> None:
        """Take a session out. Its pages are free at once, or when its turn ends."""
        del self._live[session.id]
        _count_less(self._owners, session.owner)
        _count_less(self.modules, session.module)
        session.gone = reason
        self.forget_reply(session)
        self._ended[session.id] = reason, session.owner
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        self.counts[reason] += 1
        if not session.turn.locked():
            self.clear(session)
        self._freed()


def _count_less(counts: "Counter[KeyT]", key: KeyT) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _gone(id: str, reason: str) -> SessionGone:  # noqa: A002
    reasons = {
        "expired": "no request for it came within its ttl_s",
        "evicted": "other sessions needed its memory; a pinned session is never evicted",
        "restarted": "the server has been restarted since",
        "elsewhere_or_gone": "another process has it, or had it before a restart; send the x-session-id with which it "
        "was opened",
        "deleted": "it was deleted",
    }
    return SessionGone(
        f"session {id[:64]!r} is gone: {reasons[reason]}; open a new one", param="session", reason=reason
    )

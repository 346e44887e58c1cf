"""Limits that an ASGI application cannot see: connections, request heads while they arrive, and slow peers.

``ConnectionLimits`` checks every connection once a second: ``guarded_http`` and ``guarded_stream``.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol

import structlog
from starlette.types import Scope

from attention_contract.errors import AttentionError, ConnectionsExhausted, TooManyConnections
from attention_service.api.http_limits.descriptors import most_connections, reserve
from attention_service.runtime.scheduling.entrance import Entrance
from attention_service.runtime.ticks import to_tick
from attention_service.settings import Settings

log = structlog.get_logger(__name__)
LATE: Final = "late"
"""The key of a request's ``scope["state"]`` that holds the error of a body that the guard gave up."""
CAME: Final = "came"
"""The key of the time, of ``time.monotonic``, at which a request came that waited at the entrance."""
CROWDED: Final = "crowded"
"""The key of the refusal of a request that waited at the entrance for too long."""
BODY_VIEWS: Final = "attention.body_views"
"""The ASGI extension of a server that takes memoryviews for bodies; others ask for bytes, which are a copy."""
LEAVING_S: Final = 2.0
"""Seconds for which a refused caller may read its refusal."""
_STOPPING_SWEEP_S: Final = 0.1
_BODY_GRACE_S: Final = 1.0
"""Seconds that a stop waits for the rest of a body."""


class LimitedConnection(Protocol):
    """A connection that the guard checks."""

    def check(self, now: float) -> None:
        """Cut the connection if it exceeds a deadline at this time."""


class ConnectionLimits:
    """The connections of one server: how many there are, and which of them are too slow."""

    def __init__(self, settings: Settings, name_of: Callable[[Scope], str]) -> None:
        """``name_of`` returns the caller of a request that waits at the entrance."""
        self.settings = settings
        self.max_connections = most_connections(settings.max_connections)
        self.crowded = self.max_connections + reserve() // 2
        """Connections above which a refused one is cut without an answer."""
        self.ended: Counter[str] = Counter()
        """Connections that were refused or cut, by cause."""
        self.entrance: Entrance | None = None
        """The entrance of the engine, once there is one."""
        self.name_of = name_of
        self.stopping_at: float | None = None
        """The time of ``time.monotonic`` at which bodies are no longer waited for; None while the server runs."""
        self.swept_at = time.monotonic()
        """The time of ``time.monotonic`` of the last check. The event loop turned then."""
        self._open: set[LimitedConnection] = set()
        self._addresses: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return the number of open connections."""
        return len(self._open)

    def enter(self, line: LimitedConnection, address: str | None) -> AttentionError | None:
        """Count a connection. Returns the refusal if there are too many."""
        self._open.add(line)
        if address is not None:
            self._addresses[address] += 1
            limit = self.settings.max_connections_per_address
            if self._addresses[address] > limit:
                return TooManyConnections(
                    f"{address} has {self._addresses[address]} connections; max_connections_per_address allows "
                    f"{limit}. Send requests over fewer connections",
                    limit=limit,
                    actual=self._addresses[address],
                )
        if len(self._open) > self.max_connections:
            return ConnectionsExhausted(
                f"the server has {len(self._open)} connections; max_connections allows {self.max_connections}. Try "
                "again in a moment",
                limit=self.max_connections,
                actual=len(self._open),
            )
        return None

    def leave(self, line: LimitedConnection, address: str | None) -> None:
        """Forget a connection."""
        self._open.discard(line)
        if address is not None:
            self._addresses[address] -= 1
            if self._addresses[address] <= 0:
                del self._addresses[address]

    def stop(self) -> None:
        """Give bodies that have not come whole a last moment."""
        self.stopping_at = time.monotonic() + _BODY_GRACE_S

    async def watch(self) -> None:
        """Check all connections once a second, until cancelled."""
        while True:
            await asyncio.sleep(to_tick() if self.stopping_at is None else _STOPPING_SWEEP_S)
            self.sweep(time.monotonic())

    def sweep(self, now: float) -> None:
        """Cut the connections that exceed a deadline at this time, and log how many were refused or cut."""
        self.swept_at = now
        for line in tuple(self._open):
            line.check(now)
        if new := self.ended - self._reported:
            self._reported = self.ended.copy()
            log.warning("connections refused or cut", **new, open=len(self._open))

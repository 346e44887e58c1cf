"""The connections that wait for their next request."""

import threading
from collections import deque
from typing import Generic, Protocol, TypeVar

import httpx

from attention_client.pool.origin import Origin

DEFAULT_LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=100, keepalive_expiry=5.0)
"""As httpx's, but that every connection may be kept: what is asked side by side is mostly asked again."""


class Connection(Protocol):
    """What both kinds of connection can be asked."""

    origin: Origin

    def is_usable(self, expiry: float | None) -> bool:
        """Whether it has waited no longer than ``expiry`` seconds and the server has not closed it."""

    def close(self) -> None:
        """Close it at once."""


ConnectionT = TypeVar("ConnectionT", bound=Connection)


class Kept(Generic[ConnectionT]):
    """Waiting connections to any origin, the one that was used last at the end. Safe to share between threads."""

    def __init__(self, limits: httpx.Limits) -> None:
        self._most = limits.max_keepalive_connections
        self._expiry = limits.keepalive_expiry
        self._idle: deque[ConnectionT] = deque()
        self._changing = threading.Lock()

    def take(self, origin: Origin) -> ConnectionT | None:
        """The usable connection to this origin that was used last; those that are no longer usable are closed."""
        while True:
            with self._changing:
                found = next((one for one in reversed(self._idle) if one.origin == origin), None)
                if found is None:
                    return None
                self._idle.remove(found)
            if found.is_usable(self._expiry):
                return found
            found.close()

    def put(self, connection: ConnectionT) -> None:
        """Keep a connection; the one that has waited longest is closed where there are too many."""
        surplus = None
        with self._changing:
            self._idle.append(connection)
            if self._most is not None and len(self._idle) > self._most:
                surplus = self._idle.popleft()
        if surplus is not None:
            surplus.close()

    def close(self) -> None:
        """Close them all."""
        with self._changing:
            idle, self._idle = self._idle, deque()
        for connection in idle:
            connection.close()

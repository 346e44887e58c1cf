"""The connections that wait for their next request."""

import math
import threading
import time
from collections import deque
from typing import Generic, Protocol, TypeVar

import httpx

from attention_client.pool.origin import Origin

DEFAULT_LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=100, keepalive_expiry=5.0)
"""As httpx's, but that every connection may be kept: what is asked side by side is mostly asked again."""


class Connection(Protocol):
    """What both kinds of connection can be asked."""

    origin: Origin
    waits_since: float
    """Set when it is put among those that wait; seconds of ``time.monotonic``."""

    def is_usable(self) -> bool:
        """Whether another request can be sent over it: the server has neither closed it nor said anything unasked."""

    def close(self) -> None:
        """Close it at once."""


ConnectionT = TypeVar("ConnectionT", bound=Connection)


class Kept(Generic[ConnectionT]):
    """Waiting connections to any origin, the one that was used last at the end. Safe to share between threads."""

    def __init__(self, limits: httpx.Limits) -> None:
        self._most = limits.max_keepalive_connections
        self._expiry = math.inf if limits.keepalive_expiry is None else limits.keepalive_expiry
        self._closed = False
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
            if not self._is_expired(found, time.monotonic()) and found.is_usable():
                return found
            found.close()

    def put(self, connection: ConnectionT) -> None:
        """Keep a connection. Closed are those that have waited too long, and the longest where there are too many."""
        now = connection.waits_since = time.monotonic()
        surplus = []
        with self._changing:
            self._idle.append(connection)
            most = 0 if self._closed else math.inf if self._most is None else self._most
            while self._idle and (len(self._idle) > most or self._is_expired(self._idle[0], now)):
                surplus.append(self._idle.popleft())
        for one in surplus:
            one.close()

    def _is_expired(self, connection: ConnectionT, now: float) -> bool:
        return now - connection.waits_since > self._expiry

    def close(self) -> None:
        """Close them all, and from now on whatever is put back."""
        with self._changing:
            self._closed = True
            idle, self._idle = self._idle, deque()
        for connection in idle:
            connection.close()

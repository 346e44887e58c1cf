"""The rates of callers: requests, bytes and the device's time a second, and requests at a time."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from attention_contract.errors import CallerLimit
from attention_service.runtime.callers import UNLIMITED, Caller
from attention_service.runtime.request_timing import RequestTiming, timing

WINDOW_S: Final = 2.0
"""Seconds of a rate that a caller may use at once."""
LONGEST_RETRY_S: Final = 120
"""The most seconds in ``Retry-After``: the package of OpenAI does not repeat a request that is to wait longer."""
_REMEMBERED: Final = 4096
"""Callers beyond which those are forgotten who have used nothing for a while."""


@dataclass(slots=True)
class _Bucket:
    """The use of one resource by a caller, less what its rate has given back since."""

    level: float = 0.0
    at: float = 0.0

    def now(self, rate: float, now: float) -> float:
        """Return the level at this time of ``time.monotonic``."""
        self.level, self.at = max(self.level - rate * (now - self.at), 0.0), now
        return self.level


@dataclass(slots=True)
class _Use:
    """The use of all resources by a caller."""

    running: int = 0
    requests: _Bucket = field(default_factory=_Bucket)
    bytes: _Bucket = field(default_factory=_Bucket)
    device: _Bucket = field(default_factory=_Bucket)
    seen: float = 0.0


class Quotas:
    """The callers' use of their rates. Used from the event loop only.

    A request counts when it comes. Its bytes and its time on the device count when it ends, and those who have used too
    much wait until their rate has given it back (a leaky bucket as a meter).
    """

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}

    def enter(self, caller: Caller) -> None:
        """Count a request that begins. Raises CallerLimit before it counts if one of the caller's limits is reached."""
        limits = caller.limits
        if limits is UNLIMITED:
            return
        now = time.monotonic()
        use = self._uses.setdefault(caller.name, _Use())
        use.seen = now
        caller.check("concurrent", use.running + 1, f"{use.running} requests run already; wait for an answer")
        rates = (
            ("requests_per_s", limits.requests_per_s, use.requests, 1.0),
            ("bytes_per_s", limits.bytes_per_s, use.bytes, 0.0),
            ("device_ms_per_s", limits.device_ms_per_s, use.device, 0.0),
        )
        for name, rate, bucket, more in rates:
            if rate is not None:
                _check(caller, name, rate, bucket.now(rate, now) + more)
        use.requests.level += 1
        use.running += 1
        if len(self._uses) > _REMEMBERED:
            self._uses = {name: uses for name, uses in self._uses.items() if uses.running or now - uses.seen < 60}

    def leave(self, caller: Caller, noted: RequestTiming | None) -> None:
        """Count the bytes and the device's time of a request that entered, and has ended."""
        if caller.limits is UNLIMITED or (use := self._uses.get(caller.name)) is None:
            return
        use.running -= 1
        if noted is not None:
            use.bytes.level += noted.bytes
            use.device.level += sum(run.compute_ms / getattr(run, "batch", 1) for run in noted.runs)

    @contextmanager
    def used(self, caller: Caller) -> Iterator[None]:
        """Count what the block is as a request. Raises CallerLimit before it begins."""
        self.enter(caller)
        try:
            yield
        finally:
            self.leave(caller, timing.get())


def _check(caller: Caller, name: str, rate: float, level: float) -> None:
    """Raise CallerLimit if a level is more than two seconds of a rate, or than one request if that is more."""
    most = max(rate * WINDOW_S, 1.0)
    if level > most:
        error = CallerLimit(
            f"{level:.4g} are used; the limit {name} of {caller.name!r} is {rate:g}, over {WINDOW_S:g} s. Send "
            "the request again after Retry-After, and at a lower rate",
            limit=rate,
            actual=round(level / WINDOW_S, 3),
        )
        error.retry_after = min(max(math.ceil((level - most) / rate), 1), LONGEST_RETRY_S)
        raise error

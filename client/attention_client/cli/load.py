"""Load on a running server: requests in flight at once, their latencies, and what the server says of each."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from attention_contract.errors import AttentionError

PERCENTILES: Final = (50, 90, 99)
Send = Callable[[], Awaitable[Any]]
"""Send one request, and return its reply."""


@dataclass
class Measured:
    """Replies and refusals at one level of concurrency."""

    concurrency: int
    latencies_ms: list[float] = field(default_factory=list)
    """From building the request to the decoded reply, of those that succeeded."""
    compute_ms: list[float] = field(default_factory=list)
    """On the server's device, as its replies say."""
    queue_ms: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    """Codes of the refusals."""
    seconds: float = 0.0

    @property
    def summary(self) -> "Summary":
        """The figures of this level."""
        spread = [float(one) for one in np.percentile(self.latencies_ms or [np.nan], PERCENTILES)]
        p50, p90, p99 = spread if self.latencies_ms else [None] * len(PERCENTILES)
        return Summary(
            concurrency=self.concurrency,
            succeeded=len(self.latencies_ms),
            errors=dict(self.errors),
            seconds=self.seconds,
            requests_per_second=len(self.latencies_ms) / self.seconds if self.seconds else 0.0,
            p50_ms=p50,
            p90_ms=p90,
            p99_ms=p99,
            max_ms=max(self.latencies_ms, default=None),
            compute_ms=_median(self.compute_ms),
            queue_ms=_median(self.queue_ms),
            batch=float(np.mean(self.batches)) if self.batches else None,
        )


@dataclass(frozen=True)
class Summary:
    """Figures of one level of concurrency; times are None if no request succeeded."""

    concurrency: int
    succeeded: int
    errors: dict[str, int]
    seconds: float
    requests_per_second: float
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    compute_ms: float | None
    """Median on the server's device."""
    queue_ms: float | None
    """Median between admission and execution."""
    batch: float | None
    """Mean number of requests that ran together."""

    def data(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)


def _median(values: list[float]) -> float | None:
    return float(np.median(values)) if values else None


async def measure(send: Send, concurrency: int, requests: int, done: Callable[[], None]) -> Measured:
    """Send this many requests with so many in flight at once; call ``done`` after each."""
    measured, left = Measured(concurrency), iter(range(requests))

    async def keep_sending() -> None:
        for _ in left:  # all senders draw from one iterator
            began = time.perf_counter()
            try:
                reply = await send()
            except AttentionError as fault:
                measured.errors[fault.code] += 1
            else:
                measured.latencies_ms.append(1e3 * (time.perf_counter() - began))
                measured.compute_ms.append(reply.ran.compute_ms)
                measured.queue_ms.append(reply.ran.queue_ms)
                measured.batches.append(reply.ran.batch)
            done()

    began = time.perf_counter()
    await asyncio.gather(*(keep_sending() for _ in range(min(concurrency, requests))))
    measured.seconds = time.perf_counter() - began
    return measured

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


@dataclass(frozen=True)
class Summary:
    """Figures of one level of concurrency; times are None if no request succeeded."""

    concurrency: int
    succeeded: int
    errors: dict[str, int]
    """Refusals, by their code."""
    seconds: float
    requests_per_second: float
    p50_ms: float | None
    """From building the request to the decoded reply, of those that succeeded."""
    p90_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    compute_ms: float | None
    """Median on the server's device."""
    queue_ms: float | None
    """Median between admission and execution."""
    batch: float | None
    """Mean number of requests that ran together."""

    @property
    def times(self) -> dict[str, float | None]:
        """The milliseconds and the batch, by the heading of their column."""
        return {
            "p50 ms": self.p50_ms, "p90 ms": self.p90_ms, "p99 ms": self.p99_ms, "largest ms": self.max_ms,
            "compute ms": self.compute_ms, "queued ms": self.queue_ms, "batch": self.batch,
        }  # fmt: skip

    def data(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)


@dataclass
class Measured:
    """Replies and refusals at one level of concurrency."""

    concurrency: int
    latencies_ms: list[float] = field(default_factory=list)
    compute_ms: list[float] = field(default_factory=list)
    queue_ms: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def summary(self) -> Summary:
        """The figures of this level."""
        count = len(self.latencies_ms)
        p50, p90, p99 = np.percentile(self.latencies_ms, PERCENTILES).tolist() if count else [None] * 3
        return Summary(
            self.concurrency,
            count,
            dict(self.errors),
            self.seconds,
            count / self.seconds if self.seconds else 0.0,
            p50,
            p90,
            p99,
            max(self.latencies_ms, default=None),
            _median(self.compute_ms),
            _median(self.queue_ms),
            float(np.mean(self.batches)) if self.batches else None,
        )


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

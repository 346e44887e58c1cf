"""Load on a running server: requests in flight at once, their latencies, and what the server says of each."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from attention_contract.errors import AttentionError
from attention_contract.schemas.attention import Ran

PERCENTILES: Final = (50, 90, 99)
Send = Callable[[], Awaitable[Any]]
"""Send one request, and return its reply."""


@dataclass
class Measured:
    """Replies and refusals at one level of concurrency."""

    concurrency: int
    latencies_ms: list[float] = field(default_factory=list)
    """From building the request to the decoded reply, of those that succeeded."""
    ran: list[Ran] = field(default_factory=list)
    """The runs of these on the server."""
    errors: Counter[str] = field(default_factory=Counter)
    """Codes of the refusals."""
    seconds: float = 0.0

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of this level: percentiles and medians, and the mean number that ran together.

        Times are None if no request succeeded.
        """
        succeeded = len(self.latencies_ms)
        spread = np.percentile(self.latencies_ms, PERCENTILES).tolist() if succeeded else [None] * len(PERCENTILES)
        return {
            "concurrency": self.concurrency,
            "succeeded": succeeded,
            "errors": dict(self.errors),
            "seconds": self.seconds,
            "requests_per_second": succeeded / self.seconds if self.seconds else 0.0,
            **{f"p{percent}_ms": value for percent, value in zip(PERCENTILES, spread, strict=True)},
            "max_ms": max(self.latencies_ms, default=None),
            "compute_ms": float(np.median([ran.compute_ms for ran in self.ran])) if succeeded else None,
            "queue_ms": float(np.median([ran.queue_ms for ran in self.ran])) if succeeded else None,
            "batch": float(np.mean([ran.batch for ran in self.ran])) if succeeded else None,
        }


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
                measured.ran.append(reply.ran)
            done()

    began = time.perf_counter()
    await asyncio.gather(*(keep_sending() for _ in range(min(concurrency, requests))))
    measured.seconds = time.perf_counter() - began
    return measured

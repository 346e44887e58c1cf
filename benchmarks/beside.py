"""Tiny requests beside a large one, over HTTP: their latency, and how soon an abandoned large one has stopped.

The large request: 8 heads of width 64, float32.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np

from attention_contract.schemas.attention import RawForwardRequest
from attention_contract.wire import SAFETENSORS, to_body
from benchmarks.page import parser, publish
from benchmarks.processes import cores_for, free_port, running
from benchmarks.tables import table

HEADERS = {"content-type": SAFETENSORS, "accept": SAFETENSORS}
CORES = 2
_QUIET_S = 2.0
"""Seconds of tiny requests alone."""


def body(tokens: int, heads: int = 8) -> bytes:
    """Return a request of raw attention over this many tokens."""
    query = np.random.default_rng(0).standard_normal((1, heads, tokens, 64), dtype=np.float32)
    return b"".join(to_body(RawForwardRequest(query=query), SAFETENSORS, "request"))


def latencies(http: httpx.Client, tiny: bytes, until: float) -> Iterator[float]:
    """Milliseconds of tiny requests, one after the other, until a time of ``time.monotonic``."""
    while (since := time.monotonic()) < until:
        http.post("/v1/attention/forward", content=tiny, headers=HEADERS).raise_for_status()
        yield (time.monotonic() - since) * 1e3


def in_flight(http: httpx.Client) -> int:
    """Bytes of the requests that wait or run."""
    return int(http.get("/v1").json()["memory"]["in_flight_bytes"])


def measure(url: str, tokens: int, seconds: float) -> tuple[list[float], list[float], float]:
    """Milliseconds of tiny requests alone and beside the large one, and of its stop."""
    tiny, large = body(16), body(tokens)
    with httpx.Client(base_url=url, timeout=60) as http:
        alone = list(latencies(http, tiny, time.monotonic() + _QUIET_S))
        leaving = httpx.Client(base_url=url, timeout=httpx.Timeout(60, read=seconds + 2))
        left: list[float] = []

        def ask() -> None:
            with suppress(httpx.ReadTimeout):
                leaving.post("/v1/attention/forward", content=large, headers=HEADERS)
            left.append(time.monotonic())

        asking = threading.Thread(target=ask)
        asking.start()
        while not in_flight(http):
            time.sleep(0.001)
        time.sleep(0.2)
        beside = list(latencies(http, tiny, time.monotonic() + seconds))
        if not in_flight(http):
            raise RuntimeError(f"the large request ended within {seconds} s; ask for more tokens")
        asking.join()
        while in_flight(http):
            time.sleep(0.001)
        stopped = (time.monotonic() - left[0]) * 1e3
    return alone, beside, stopped


def lines(tokens: int, seconds: float) -> Iterator[str]:
    """Start a server and measure."""
    port = free_port()
    cores, _ = cores_for(CORES)
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "attention_service", "--models-dir", folder, "--port", str(port)]
        command += ["--calibrate", "false"]
        with running(command, port, "/health/ready", cores, {}, Path(folder) / "log") as server:
            alone, beside, stopped = measure(server.url, tokens, seconds)
    rows = [
        [name, str(len(found)), *(f"{np.percentile(found, share):.1f}" for share in (50, 99, 100))]
        for name, found in (("alone", alone), (f"beside {tokens} tokens", beside))
    ]
    yield from table(["tiny requests", "count", "p50 ms", "p99 ms", "longest ms"], rows).splitlines()
    yield f"\nThe large request stopped {stopped:.0f} ms after its caller had left."


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, 1)
    options.add_argument("--tokens", type=int, default=20_000)
    options.add_argument("--seconds", type=float, default=5.0, help="of tiny requests beside the large one")
    arguments = options.parse_args()
    publish(
        "Beside",
        "Tiny requests beside a large one, over HTTP.",
        lines(arguments.tokens, arguments.seconds),
        arguments.output,
    )


if __name__ == "__main__":
    main()

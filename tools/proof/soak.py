"""A soak: many users do everything at once, over HTTP, for minutes. ``python -m tools.proof.soak --minutes 15``.

A row is printed now and then, and the operations by status at the end. Exits with 1 if an answer was wrong, memory grew
after the warm-up, or a descriptor, a thread or a byte of the budget is left.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import httpx
import psutil
from benchmarks.processes import Running
from benchmarks.tables import short, table

from tools.proof.servers import serving
from tools.proof.walkers import CONFIG, SHARED, FaultError, Walker

SETTINGS = {"memory_budget": "2GiB", "session_share": 0.0015, "session_ttl_s": 20, "log_level": "warning",
            "spare_model_process": False}  # fmt: skip
"""Room for few sessions, so that some are evicted; others expire. A spare process would come with pipes of its own."""
MODEL = {"checkpoint": "tiny"}
ROWS = 30
WARM_UP = 1 / 3
"""Share of the time after which memory is compared: the first sixth after it with the last."""
REST_S = 40
"""Seconds within which all that was taken is given back: sessions that were left expire first."""


@dataclass(frozen=True)
class Held:
    """What a server holds at one time."""

    resident: int
    """Bytes, as ``own_memory`` counts them."""
    descriptors: int
    threads: int
    in_flight: int
    modules: int
    sessions: int

    @classmethod
    async def of(cls, server: Running, http: httpx.AsyncClient) -> "Held":
        """Measure a server."""
        process = psutil.Process(server.process.pid)
        reply = (await http.get("/v1")).json()
        sessions = (await http.get("/v1/sessions")).json()["sessions"]
        memory = reply["memory"]
        return cls(
            own_memory(process.pid), process.num_fds(), process.num_threads(), memory["in_flight_bytes"],
            memory["resident_bytes"], len(sessions),
        )  # fmt: skip


def own_memory(process: int) -> int:
    """Return the bytes that a process has for itself, swapped or not.

    The system takes pages of mapped files away and gives them back as it likes, so they are not counted.
    """
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines() if ":" in line)
    return 1024 * sum(int(lines[name].split()[0]) for name in ("RssAnon", "VmSwap"))


class Soak:
    """A soak of one server, and the faults that it finds."""

    def __init__(self, server: Running, minutes: float, users: int, growth: float) -> None:
        self.server, self.seconds, self.users, self.growth = server, 60 * minutes, users, growth
        self.counts: Counter[tuple[str, int]] = Counter()
        self.resident: list[int] = []
        self.faults: list[str] = []

    async def run(self) -> list[str]:
        """Let the users walk, printing rows on the way; return what is wrong."""
        limits = httpx.Limits(max_keepalive_connections=4)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=60, limits=limits) as http:
            await http.post("/v1/modules", json={"name": SHARED, "config": CONFIG, "seed": 0})
            await http.post("/v1/models", json=MODEL)  # its pipes are open from now on
            before = await Held.of(self.server, http)
            self.started = time.monotonic()
            await self._walk(http)
            await http.post("/v1/models", json=MODEL, timeout=None)  # a busy machine may still be loading it anew
            await self._compare(before, http)
        return self.faults

    async def _walk(self, http: httpx.AsyncClient) -> None:
        print(table(["minute", "operations", "sessions", "in flight, MiB", "open files", "threads", "memory, MiB"], []))
        async with httpx.AsyncClient(base_url=self.server.url, timeout=60) as shared:
            walkers = [Walker(shared, seed, self.counts) for seed in range(self.users)]
            walking = asyncio.gather(*(walker.walk(self._is_over) for walker in walkers))
            row, every = 0, min(self.seconds / ROWS, 5.0)
            while not walking.done():
                await asyncio.wait([walking], timeout=every)
                held = await Held.of(self.server, http)
                self.resident.append(held.resident)
                if len(self.resident) * ROWS >= row * self.seconds / every:
                    row += 1
                    self._print(held)
            try:
                walking.result()
            except (FaultError, httpx.TransportError) as fault:
                place = f" for {fault.request.url.path}" if isinstance(fault, httpx.TransportError) else ""
                self.faults.append(f"{type(fault).__name__}{place}: {fault}")
                self.seconds = 0

    def _is_over(self) -> bool:
        return bool(self.faults) or time.monotonic() - self.started > self.seconds

    def _print(self, held: Held) -> None:
        minute = short((time.monotonic() - self.started) / 60)
        numbers = [held.in_flight / 2**20, held.descriptors, held.threads, held.resident / 2**20]
        cells = [minute, f"{self.counts.total():,}", str(held.sessions), *map(short, numbers)]
        print(f"| {' | '.join(cells)} |", flush=True)

    async def _compare(self, before: Held, http: httpx.AsyncClient) -> None:
        """Wait until the server holds what it held before, and say what is left; compare its memory over time."""
        deadline = time.monotonic() + REST_S
        while True:
            after = await Held.of(self.server, http)
            left = {name: getattr(after, name) - getattr(before, name) for name in ("in_flight", "modules", "sessions")}
            left["descriptors"] = max(after.descriptors - before.descriptors, 0)
            if not any(left.values()) or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
        self.faults += [f"{number} of {name} are left" for name, number in left.items() if number]
        sixth, warm = len(self.resident) // 6, int(len(self.resident) * WARM_UP)
        if sixth:
            early, late = median(self.resident[warm : warm + sixth]), median(self.resident[-sixth:])
            grown = late / early - 1
            print(f"\nmemory after the warm-up: {early / 2**20:.1f} MiB, at the end {late / 2**20:.1f} MiB, "
                  f"{grown:+.2%}; open files {before.descriptors} and {after.descriptors}, "
                  f"threads {before.threads} and {after.threads}, in flight {after.in_flight} bytes")  # fmt: skip
            if grown > self.growth:
                self.faults.append(f"memory grew by {grown:.1%}; at most {self.growth:.0%} is allowed")

    def report(self) -> str:
        """A table of operations by status."""
        kinds = sorted({kind for kind, _ in self.counts})
        rows = []
        for kind in kinds:
            by_status = sorted((status, count) for (each, status), count in self.counts.items() if each == kind)
            text = ", ".join(f"{status or 'left'}: {count:,}" for status, count in by_status)
            rows.append([kind, text, f"{sum(count for _, count in by_status):,}"])
        return table(["operation", "answers by status", "all"], [*rows, ["all", "", f"{self.counts.total():,}"]], 2)


def soak(minutes: float, users: int, growth: float) -> list[str]:
    """Soak a server of its own, print what it did, and return what is wrong."""
    with TemporaryDirectory() as folder, serving(Path(folder), **SETTINGS) as server:
        made = Soak(server, minutes, users, growth)
        faults = asyncio.run(made.run())
        log = (Path(folder) / f"server-{server.port}.log").read_text(errors="replace")
        faults += [f"the server logged {line[:300]}" for line in log.splitlines() if '"level": "error"' in line][:5]
    print(f"\n{made.report()}\n")
    print(*(faults or ["sound: nothing is left, and no answer was unexpected"]), sep="\n")
    return faults


def main() -> int:
    """Soak, and return the exit status."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--minutes", type=float, default=15.0)
    made.add_argument("--users", type=int, default=24)
    made.add_argument("--growth", type=float, default=0.02, help="largest growth of memory after the warm-up")
    options = made.parse_args()
    return int(bool(soak(options.minutes, options.users, options.growth)))


if __name__ == "__main__":
    sys.exit(main())

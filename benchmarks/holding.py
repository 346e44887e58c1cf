"""Waiting time that one demanding request causes, measured by pings on a connection of their own.

``python -m benchmarks.holding`` prints the table; ``--only TEXT`` takes the requests whose name has the text.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.contestants import SERVICE, serving
from benchmarks.demanding import Demand, demanding
from benchmarks.page import fewer, parser, publish
from benchmarks.sockets import HEAD_END
from benchmarks.tables import short, table
from benchmarks.workloads import WORKLOADS

PING = Demand("nothing but pings", "GET", "/health/live")
PAUSE_S = 0.001
"""Between two pings."""
QUIET_S = 0.5
"""Seconds of pings alone, before each request."""


@dataclass(frozen=True)
class Held:
    """Effect of one request on the others."""

    status: int
    seconds: float
    longest: float
    """Seconds of the longest ping while it was answered."""


class Connection:
    """One connection, kept open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, demand: Demand) -> int:
        """The status of an answer, which is read to its end."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(demand.bytes)
        head = await reader.readuntil(HEAD_END)
        lines = head.lower().split(b"\r\n")
        lengths = [int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:")]
        await reader.readexactly(lengths[0])
        if b"connection: close" in lines:
            await self.close()
        return int(head.split(b" ", 2)[1])

    async def close(self) -> None:
        """Close it; the next request opens another."""
        if self._streams is not None:
            _, writer = self._streams
            self._streams = None
            writer.close()
            await writer.wait_closed()


async def held(port: int, demand: Demand) -> Held:
    """Ask, and ping until the answer is there."""
    pings, asking = Connection(port), Connection(port)
    times: list[float] = []

    async def ping() -> None:
        while True:
            started = time.perf_counter()
            await pings.ask(PING)
            times.append(time.perf_counter() - started)
            await asyncio.sleep(PAUSE_S)

    task = asyncio.create_task(ping())
    await asyncio.sleep(QUIET_S)
    times.clear()
    started = time.perf_counter()
    status = await asking.ask(demand) if demand is not PING else await asyncio.sleep(QUIET_S, 200)
    seconds = time.perf_counter() - started
    seen = len(times)
    while len(times) == seen:  # the one that is on its way
        await asyncio.sleep(PAUSE_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await pings.close()
    await asking.close()
    return Held(status, seconds, max(times))


def lines(port: int, rounds: int, only: str) -> Iterator[str]:
    """A table of the requests, line by line as they are measured."""
    yield table(["request", "answer", "body, bytes", "first: seconds", "ping, ms", "again: seconds", "ping, ms"], [])
    for demand in [PING, *demanding()]:
        if only not in demand.name:
            continue
        found = [asyncio.run(held(port, demand)) for _ in range(rounds)]
        again = min(found[1:] or found, key=lambda one: one.longest)
        numbers = [short(value) for one in (found[0], again) for value in (one.seconds, one.longest * 1e3)]
        yield f"| {' | '.join([demand.name, str(found[0].status), f'{len(demand.body):,}', *numbers])} |"


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, 5)
    options.add_argument("--only", default="", metavar="TEXT", help="requests whose name has this text")
    arguments = options.parse_args()
    text = f"""Pings ({PING.method} {PING.path}, {PAUSE_S * 1e3:.0f} ms apart) on one connection while another asks
for much: the longest of them, when the request was first sent, and the least of the longest when it was sent again."""
    with TemporaryDirectory() as folder, serving(SERVICE, WORKLOADS["W1"], Path(folder)) as process:
        rounds = arguments.rounds or (fewer(5) if arguments.quick else 5)
        publish("Holding", text, lines(process.port, rounds, arguments.only), arguments.output)


if __name__ == "__main__":
    main()

"""A load generator for machines without ``wrk``: prepared requests in turn, on every connection.

``python -m benchmarks.sockets URL CONNECTIONS SECONDS`` with the variable REQUESTS as in ``post.lua``; prints the same
figures. It takes about twice the processor time of wrk for a request, so that the fastest servers look slower.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import numpy as np

HEAD_END = b"\r\n\r\n"


class Connection(asyncio.Protocol):
    """Sends a request, reads the answer, sends the next."""

    def __init__(self, requests: Iterator[bytes], milliseconds: list[float]) -> None:
        self.requests = requests
        self.milliseconds = milliseconds
        self.failed = 0
        self.head = b""
        self.missing = 0
        """Bytes of the body that have not come yet."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's own is not derived from it
        self.send()

    def send(self) -> None:
        """Ask once more."""
        self.started = time.perf_counter()
        self.transport.write(next(self.requests))

    def data_received(self, data: bytes) -> None:
        """Count the answer down; look at no more of it than its status and length."""
        if self.missing:
            self.missing -= len(data)
        else:
            self.head += data
            head, end, rest = self.head.partition(HEAD_END)
            if not end:
                return
            self.missing = _length(head) - len(rest)
            self.failed += head.split(b" ", 2)[1] != b"200"
            self.head = b""
        if not self.missing:
            self.milliseconds.append((time.perf_counter() - self.started) * 1e3)
            self.send()


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    raise ValueError("an answer without its length")


def prepared(file: Path, path: str, host: str) -> list[bytes]:
    """The requests of a file, as they are sent."""
    requests = []
    with file.open("rb") as lines_of_file:
        while line := lines_of_file.readline():
            head, size = map(int, line.split())
            headers = lines_of_file.read(head).decode().splitlines()
            lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {size}", *headers, "", ""]
            requests.append("\r\n".join(lines).encode() + lines_of_file.read(size))
    return requests


async def load(url: str, file: Path, connections: int, seconds: float) -> dict[str, float]:
    """The figures of one run."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    host, port = parts.hostname, parts.port
    requests = cycle(prepared(file, parts.path, parts.netloc))
    milliseconds: list[float] = []
    started = time.perf_counter()
    made = [
        await asyncio.get_running_loop().create_connection(lambda: Connection(requests, milliseconds), host, port)
        for _ in range(connections)
    ]
    await asyncio.sleep(seconds)
    took = time.perf_counter() - started
    found = list(milliseconds)
    for transport, _ in made:
        transport.abort()
    p50, p99 = np.percentile(found, (50, 99)) if found else (0.0, 0.0)
    failed = sum(protocol.failed for _, protocol in made)
    return {"requests": len(found), "seconds": took, "p50_ms": float(p50), "p99_ms": float(p99), "failed": failed}


def main(url: str, connections: str, seconds: str) -> None:
    """Run and print."""
    with suppress(ImportError):
        import uvloop  # noqa: PLC0415 - a faster loop where there is one

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    found = asyncio.run(load(url, Path(os.environ["REQUESTS"]), int(connections), float(seconds)))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Floods over one connection: the memory of the server and the time of another caller's health checks meanwhile.

``python -m benchmarks.floods`` prints the table; ``--output benchmarks/results/floods.md`` writes it.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.abuse import BUDGET, FORWARD, MIB, SPAWN, Watch, head, limited
from benchmarks.page import parser, publish
from benchmarks.tables import short, table

PATIENCE_S: Final = 90
"""Seconds after which a flood that was not ended gives up."""
TEXT = f"""One server with a memory budget of {BUDGET // MIB} MiB and the settings of a first start. Another process
sends as fast as the server reads and never reads itself. Health is `GET /health/live` on a connection of a third
process, 50 times a second. Memory is what became resident beside what was before it, at most. The time ends when the
server ends the connection, {PATIENCE_S} s at most."""
_UPGRADE: Final = head(
    "GET", "/v1/sessions/stream", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
)  # fmt: skip
_CHUNKED: Final = head("POST", FORWARD, "Content-Type: application/json", "Transfer-Encoding: chunked")
_MESSAGE: Final = 15 * MIB
FLOODS: dict[str, tuple[bytes, bytes, bytes, int]] = {
    "heads without end": (b"", b"", head("GET", "/health/live") * 1000, 1),
    "chunks of a byte": (b"", _CHUNKED, b"1\r\n[\r\n" * 10_000, 1),
    "pongs of 6 bytes": (_UPGRADE, b"", b"\x8a\x80\0\0\0\0" * 10_000, 1),
    "empty continuations": (_UPGRADE, b"\x02\x80\0\0\0\0", b"\x00\x80\0\0\0\0" * 10_000, 1),
    "pings whose pongs are not read": (_UPGRADE, b"", (b"\x89\xfd\0\0\0\0" + bytes(125)) * 1000, 1),
    "100 messages of 15 MiB without their last byte": (
        _UPGRADE, b"\x82\xff" + _MESSAGE.to_bytes(8, "big") + b"\0\0\0\0" + bytes(_MESSAGE - 1), b"", 100
    ),
}  # fmt: skip
"""A handshake, what is sent after it, what is sent again and again, and over how many connections."""


def flood(port: int, handshake: bytes, first: bytes, again: bytes, count: int) -> None:
    """Send until the server ends every connection."""
    with ExitStack() as stack:
        lines = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(count)]
        until = time.monotonic() + PATIENCE_S
        for raw in lines:
            raw.settimeout(PATIENCE_S)
            with suppress(OSError):
                raw.sendall(handshake)
                if handshake:
                    raw.recv(65536)
                raw.sendall(first)
        for raw in lines:
            _send_on(raw, again, until)


def _send_on(raw: socket.socket, again: bytes, until: float) -> None:
    with suppress(ConnectionError, TimeoutError):
        while again and time.monotonic() < until:
            raw.sendall(again)
        while time.monotonic() < until and raw.recv(MIB):
            pass


def rows() -> Iterator[str]:
    """Yield the table."""
    found = []
    with TemporaryDirectory() as folder:
        for index, (name, sent) in enumerate(FLOODS.items()):
            with limited(Path(folder) / str(index)) as server, Watch(server) as watch:
                sender = SPAWN.Process(target=flood, args=(server.port, *sent), daemon=True)
                sender.start()
                sender.join()
            found.append(_row(name, watch))
    yield table(["flood", "MiB more", "health, ms: median", "99 %", "at most", "seconds"], found)


def _row(name: str, watch: Watch) -> tuple[str, ...]:
    last = len(watch.health_s) - 1
    health = (short(1e3 * watch.health_s[int(part * last)]) for part in (0.5, 0.99, 1))
    return name, f"{(watch.most - watch.before) / MIB:.0f}", *health, f"{watch.seconds:.1f}"


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, 1).parse_args()
    publish("Floods", TEXT, rows(), options.output, ("uvicorn", "httptools", "websockets", "uvloop"))


if __name__ == "__main__":
    main()

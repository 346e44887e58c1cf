"""Hostile callers: the memory of the server and the time of others while a caller asks for too much, or is too slow.

``python -m benchmarks.abuse`` prints the table; ``--output benchmarks/results/abuse.md`` writes it.
"""

import multiprocessing
import resource
import socket
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil

from attention_client import Client
from attention_contract.schemas.attention import RawForwardRequest
from attention_contract.wire import JSON, SAFETENSORS, to_body
from benchmarks.page import parser, publish
from benchmarks.processes import Running, cores_for, free_port, running
from benchmarks.tables import short, table

BUDGET = 512 * 2**20
CONNECTIONS = 3000
WIDTH = 3072
"""Width of the module one of whose parameters has 36 MiB."""
TEXT = f"""One server with a memory budget of {BUDGET // 2**20} MiB and the settings of a first start. Each row is one
abuse from one address over loopback. Memory is what became resident beside what was before it, at most. Health is the
longest time of `GET /health/live` on a connection of another caller meanwhile. The time ends when every connection of
the abuse is answered or cut."""
FORWARD = "/v1/attention/forward"
MIB = 2**20
SPAWN = multiprocessing.get_context("spawn")


@dataclass
class Watch:
    """The memory of a server, and the time in which it answers another caller, while a block runs."""

    server: Running
    before: int = 0
    most: int = 0
    health_s: Sequence[float] = ()
    """Times of the other caller's requests, the shortest first."""
    failures: int = 0
    seconds: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)

    def __enter__(self) -> "Watch":
        self._process, self._ends = psutil.Process(self.server.process.pid), threading.Event()
        self._weighing = threading.Thread(target=self._weigh, daemon=True)
        self._pipe, far = SPAWN.Pipe()
        self._caller = SPAWN.Process(target=ask_health, args=(self.server.port, far), daemon=True)
        self._caller.start()
        self._pipe.recv()  # it asks
        self.before = self.most = self._process.memory_info().rss
        self._started = time.monotonic()
        self._weighing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._started
        self._ends.set()
        self._weighing.join()
        self._pipe.send("stop")
        self.health_s, self.failures = self._pipe.recv()
        self._caller.join()

    def _weigh(self) -> None:
        while not self._ends.wait(0.01):
            self.most = max(self.most, self._process.memory_info().rss)


def ask_health(port: int, pipe: Connection) -> None:
    """Ask a server for its health on one connection until told to stop; then send the times and the failures."""
    times: list[float] = []
    failures = 0
    with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as http:
        while not pipe.poll(0.02):
            began = time.monotonic()
            http.request("GET", "/health/live")
            answer = http.getresponse()
            answer.read()
            failures += answer.status != 200
            if not times:
                pipe.send("asking")
            times.append(time.monotonic() - began)
    pipe.send((sorted(times), failures))


@contextmanager
def limited(folder: Path, files: int | None = None) -> Iterator[Running]:
    """A server with the budget. ``files``: its limit of open files."""
    folder.mkdir()
    port = free_port()
    command = [sys.executable, "-m", "attention_service", "--port", str(port), "--models-dir", str(folder)]
    command += ["--memory-budget", str(BUDGET), "--calibrate", "false", "--log-level", "warning"]
    if files is not None:
        command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
    with running(command, port, "/health/ready", cores_for(2)[0], {}, folder / "log") as server:
        yield server


@contextmanager
def connected(server: Running, receives: int | None = None) -> Iterator[socket.socket]:
    """A connection. ``receives``: bytes that this side's system keeps."""
    raw = socket.socket()
    raw.settimeout(60)
    if receives is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
    raw.connect(("127.0.0.1", server.port))
    with raw:
        yield raw


def head(method: str, path: str, *lines: str) -> bytes:
    """The head of a request."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


def end(raw: socket.socket) -> str:
    """Read a connection to its end. Returns the status of its first answer, or ``cut``."""
    first = b""
    with suppress(OSError):
        while piece := raw.recv(MIB):
            first = first or piece
            if first[9:12] in {b"431", b"408", b"413", b"429", b"503", b"400"}:
                break
    return first[9:12].decode() or "cut"


def send(raw: socket.socket, data: bytes) -> None:
    """Send until the server takes no more."""
    with suppress(OSError):
        raw.sendall(data)


def unread_replies(watch: Watch, count: int = 60, rows: int = 1000, width: int = 8192) -> None:
    """Ask for replies of 31 MiB and read none of them."""
    one = np.ones((rows, 1), np.float32)
    request = RawForwardRequest(query=one, key=one, value=np.ones((rows, width), np.float32))
    body = b"".join(to_body(request, SAFETENSORS, "request"))
    sent = (
        head("POST", FORWARD, f"Content-Type: {SAFETENSORS}", f"Content-Length: {len(body)}", "Connection: close")
        + body
    )
    with ExitStack() as stack:
        callers = [stack.enter_context(connected(watch.server, 2**14)) for _ in range(count)]
        threads = [threading.Thread(target=send, args=(raw, sent)) for raw in callers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(25)  # the deadline for readers, and the sweep after it
        watch.answers.update(end(raw) for raw in callers)


def json_reads(watch: Watch, count: int = 8) -> None:
    """Read one parameter of 36 MiB as JSON, several times at once."""
    request = head("GET", "/v1/modules/wide/parameters/q_proj.weight", "Connection: close")

    def read() -> None:
        with connected(watch.server) as raw:
            raw.sendall(request)
            watch.answers[end(raw)] += 1

    threads = [threading.Thread(target=read) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def silent_connections(watch: Watch, count: int = CONNECTIONS) -> None:
    """Open connections and send nothing."""
    with ExitStack() as stack:
        lines = []
        for _ in range(count):
            try:
                lines.append(stack.enter_context(connected(watch.server)))
            except ConnectionResetError:
                watch.answers["cut"] += 1
        watch.answers.update(end(raw) for raw in lines)


def bodies_without_end(watch: Watch, count: int = 4, size: int = 128 * MIB) -> None:
    """Send bodies but for their last byte, and see how long another body waits."""
    request = head("POST", FORWARD, f"Content-Type: {SAFETENSORS}", f"Content-Length: {size}") + bytes(size - 1)
    with ExitStack() as stack:
        lines = [stack.enter_context(connected(watch.server)) for _ in range(count)]
        threads = [threading.Thread(target=send, args=(raw, request)) for raw in lines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        watch.answers.update(end(raw) for raw in lines)


def one_header(watch: Watch, size: int = 48 * MIB) -> None:
    """Send one header without end."""
    with connected(watch.server) as raw:
        send(raw, b"GET /v1 HTTP/1.1\r\nX: " + b"a" * size)
        watch.answers[end(raw)] += 1


def many_headers(watch: Watch, size: int = 12 * MIB) -> None:
    """Send headers of 4 bytes without end."""
    with connected(watch.server) as raw:
        send(raw, b"GET /v1 HTTP/1.1\r\n" + b"a:\r\n" * (size // 4))
        watch.answers[end(raw)] += 1


def bomb(watch: Watch, size: int = 3 * 2**30) -> None:
    """Send a gzip file of 3 GiB of zeros."""
    deflate = zlib.compressobj(1, wbits=zlib.MAX_WBITS | 16)
    body = deflate.compress(bytes(16 * MIB)) + deflate.flush()
    body *= size // (16 * MIB)
    lines = (f"Content-Type: {SAFETENSORS}", "Content-Encoding: gzip", f"Content-Length: {len(body)}")
    with connected(watch.server) as raw:
        send(raw, head("POST", FORWARD, *lines) + body)
        watch.answers[end(raw)] += 1


def upgrade(watch: Watch) -> None:
    """Send a body behind the upgrade that the JDK's client asks for."""
    body = b'{"query": [[1.0, 0.0]]}'
    lines = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    with connected(watch.server) as raw:
        raw.sendall(head("POST", FORWARD, *lines, f"Content-Type: {JSON}", f"Content-Length: {len(body)}") + body)
        watch.answers[raw.recv(65536)[9:12].decode()] += 1


def beyond_files(watch: Watch, count: int = 400) -> None:
    """Open more connections than a server whose limit of open files is 256 can have."""
    silent_connections(watch, count)


CASES: dict[str, tuple[Callable[[Watch], None], bool]] = {
    "60 replies of 31 MiB, none read": (unread_replies, False),
    "8 reads of a parameter of 36 MiB as JSON": (json_reads, False),
    "3,000 silent connections": (silent_connections, False),
    "4 bodies of 128 MiB without their last byte": (bodies_without_end, False),
    "a header of 48 MiB": (one_header, False),
    "12 MiB of headers of 4 bytes": (many_headers, False),
    "a gzip file of 3 GiB of zeros": (bomb, False),
    "`Upgrade: h2c` with a body": (upgrade, False),
    "400 connections, 256 open files": (beyond_files, True),
}


def rows(quick: bool) -> Iterator[str]:
    """Yield the table."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = []
    with TemporaryDirectory() as folder, ExitStack() as stack:
        wide = stack.enter_context(limited(Path(folder) / "wide"))
        with Client(wide.url) as client:
            client.modules.create("wide", {"d_model": WIDTH, "num_heads": 24}, seed=0, durable=False)
        for name, (abuse, few_files) in CASES.items():
            if quick and abuse in {unread_replies, bodies_without_end}:
                continue
            with ExitStack() as own:
                server = own.enter_context(limited(Path(folder) / "few", 256)) if few_files else wide
                with Watch(server) as watch:
                    abuse(watch)
            found.append(_row(name, watch))
    yield table(["abuse", "answers", "MiB more", "health, ms at most", "seconds"], found)


def _row(name: str, watch: Watch) -> tuple[str, ...]:
    answers = ", ".join(f"{count} × {status}" for status, count in sorted(watch.answers.items()))
    health = short(1e3 * watch.health_s[-1]) + (f" ({watch.failures} failed)" if watch.failures else "")
    return name, answers, f"{(watch.most - watch.before) / MIB:.0f}", health, f"{watch.seconds:.1f}"


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, 1).parse_args()
    publish("Abuse", TEXT, rows(options.quick), options.output, ("uvicorn", "httptools", "uvloop"))


if __name__ == "__main__":
    main()

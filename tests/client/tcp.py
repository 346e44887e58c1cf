"""Servers on the loopback: one that plays the service, and one that misbehaves."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from tests.client.service import Played


class Listening(ThreadingHTTPServer):
    """The played service over real HTTP/1.1, each connection in a thread of its own."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http{'s' if tls else ''}://localhost:{self.server_address[1]}"
        self.connections: list[tuple[str, int]] = []
        """The client's address of each request; one for each connection."""
        self.requests: list[httpx.Request] = []
        self.extra: dict[str, str] = {}
        """Headers of every answer, beside its own."""
        self.drops = False
        """Close each connection after its answer, without saying so."""
        self.closed = threading.Semaphore(0)
        """Released for each connection that has been closed from here."""
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)

    def shutdown_request(self, request: object) -> None:
        """Close a connection."""
        super().shutdown_request(request)
        self.closed.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client may go away."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Listening

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        request = httpx.Request(self.command, f"{self.server.url}{self.path}", headers=dict(self.headers), content=body)
        self.server.connections.append(self.client_address)
        self.server.requests.append(request)
        response = Played().answer(request)
        self.send_response(response.status_code)
        for name, value in {**response.headers, **self.server.extra}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(response.content)
        self.close_connection = self.close_connection or self.server.drops

    do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815 - the names that the library looks for

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@contextmanager
def listening(tls: ssl.SSLContext | None = None) -> Iterator[Listening]:
    """Run the played service on a free port."""
    server = Listening(tls)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


@contextmanager
def stubborn(talk: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """Run a TCP server that gives each connection, one after the other, to ``talk``. Yields its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                talk(connection, over)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def read_request(connection: socket.socket) -> bytes:
    """Read a request to its end and return its head."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536) or _gone()
    head, _, begun = received.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    missing = int(lengths[0].partition(b":")[2]) - len(begun) if lengths else 0
    buffer = memoryview(bytearray(2**16))
    while missing > 0:
        missing -= connection.recv_into(buffer) or _gone()
    return head


def _gone() -> int:
    raise ConnectionResetError("the client went away")

"""``Pool``: connections for ``httpx.Client``, shared by threads."""

import select
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import httpx

from attention_client.pool.allowance import Allowance
from attention_client.pool.http1 import PACKET, SCRATCH, Answer, Body, head_of
from attention_client.pool.kept import DEFAULT_LIMITS, Kept
from attention_client.pool.origin import TLS, Origin

_LEAST: Final = 1e-3
"""Seconds that a step gets where none are left: a socket takes 0 for never waiting, which is another error."""
_EITHER: Final = selectors.EVENT_READ | selectors.EVENT_WRITE
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)  # the latter where there is no poll


class Pool(httpx.BaseTransport):
    """Keeps connections open and gives each request one of them.

    Speaks HTTP/1.1 to the server itself. ``verify`` and ``trust_env`` are those of ``httpx.HTTPTransport``, which is
    the transport for HTTP/2, proxies and Unix sockets. Responses are read to their end before they are returned. At
    most ``limits.max_connections`` requests are on their way at once; others wait, up to their timeout ``pool``.
    """

    def __init__(
        self,
        *,
        verify: ssl.SSLContext | str | bool = True,
        trust_env: bool = True,
        limits: httpx.Limits = DEFAULT_LIMITS,
    ) -> None:
        self._tls = TLS(verify, trust_env)
        self._kept: Kept[_Connection] = Kept(limits)
        self._free = None if limits.max_connections is None else threading.Semaphore(limits.max_connections)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and receive the whole response."""
        allowance = Allowance(request)
        if self._free is not None and not self._free.acquire(timeout=allowance.seconds("pool")):
            raise httpx.PoolTimeout("every connection is in use", request=request)
        try:
            origin = Origin.of(request)
            connection = self._kept.take(origin) or _Connection(origin, self._tls, request, allowance)
            try:
                answer = connection.exchange(request, allowance)
            except BaseException:
                connection.close()
                raise
            if answer.reusable:
                self._kept.put(connection)
            else:
                connection.close()
        finally:
            if self._free is not None:
                self._free.release()
        return answer.response()

    def close(self) -> None:
        """Close the connections that wait for requests."""
        self._kept.close()


class _Connection:
    """One connection, used by one thread at a time."""

    def __init__(self, origin: Origin, tls: TLS, request: httpx.Request, allowance: Allowance) -> None:
        self.origin = origin
        self.waits_since = 0.0
        self._broken = ""
        """Why no more of the request could be written."""
        self._scratch = memoryview(bytearray(SCRATCH))
        begun = time.monotonic()
        try:
            self._socket = _connected(origin, allowance, begun)
        except TimeoutError as fault:
            raise httpx.ConnectTimeout("", request=request) from fault
        except OSError as fault:
            raise httpx.ConnectError(str(fault), request=request) from fault
        self._has_news = _watching(self._socket)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if origin.secure:
                _limit(self._socket, allowance, "connect", begun)
                self._socket = tls.context.wrap_socket(self._socket, server_hostname=origin.server_name)
        except TimeoutError as fault:
            self._socket.close()
            raise httpx.ConnectTimeout("", request=request) from fault
        except OSError as fault:  # and ssl's, which are of this class
            self._socket.close()
            raise httpx.ConnectError(str(fault), request=request) from fault

    def is_usable(self) -> bool:
        """Whether the server has neither closed it nor said anything unasked, be it decrypted already or not."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return False
        return not self._has_news()

    def exchange(self, request: httpx.Request, allowance: Allowance) -> Answer:
        """Send the request and receive the answer, which may come before all is sent."""
        answer = Answer(request, self._scratch)
        self._broken = ""
        sent = self._send(request, answer, allowance)
        try:
            self._receive(answer, allowance)
        except TimeoutError as fault:
            raise httpx.ReadTimeout("", request=request) from fault
        except OSError as fault:
            raise httpx.ReadError(self._broken or str(fault), request=request) from fault
        answer.reusable = answer.reusable and sent
        return answer

    def _send(self, request: httpx.Request, answer: Answer, allowance: Allowance) -> bool:
        """Whether the whole request was sent; no more is where the answer is there already, or nobody listens."""
        body = Body(request)
        waiting, size = [head_of(request)], 0
        assert isinstance(request.stream, httpx.SyncByteStream)  # noqa: S101 - httpx.Client sees to it
        for piece in request.stream:
            data = body.piece(piece)
            size += len(data)
            if size <= PACKET:
                waiting.append(data)
                continue
            if waiting and not self._write(b"".join(waiting), answer, allowance):
                return False
            waiting = []
            if not self._write(data, answer, allowance):
                return False
        rest = b"".join([*waiting, body.end()])
        return not rest or self._write(rest, answer, allowance)

    def _write(self, data: bytes, answer: Answer, allowance: Allowance) -> bool:
        """Whether all of it was sent: not where the connection broke, or the answer came while the socket was full."""
        left = memoryview(data)
        try:
            self._socket.settimeout(0.0)
            while left:
                awaited = _EITHER
                try:
                    left = left[self._socket.send(left) :]
                    continue
                except (BlockingIOError, ssl.SSLWantWriteError):
                    pass  # full
                except ssl.SSLWantReadError:  # TLS has to hear something first
                    awaited = selectors.EVENT_READ
                events = _ready(self._socket, awaited, allowance.seconds("write"))
                if not events:
                    raise httpx.WriteTimeout("", request=answer.request)
                if events & selectors.EVENT_READ:
                    self._hear(answer)
                    if answer.complete:
                        return False
        except OSError as fault:  # a server may refuse a body that it has not read to its end: see what it says
            self._broken = str(fault)
            return False
        return True

    def _hear(self, answer: Answer) -> None:
        """Receive what has come, without waiting for more."""
        try:
            count = self._socket.recv_into(answer.room())
        except (BlockingIOError, ssl.SSLWantReadError):  # as where it was for TLS alone
            return
        answer.received(count) if count else answer.ended()

    def _receive(self, answer: Answer, allowance: Allowance) -> None:
        while not answer.complete:
            _limit(self._socket, allowance, "read")
            count = self._socket.recv_into(answer.room())
            answer.received(count) if count else answer.ended()

    def close(self) -> None:
        """Close it at once."""
        with suppress(OSError):
            self._socket.close()


def _connected(origin: Origin, allowance: Allowance, begun: float) -> socket.socket:
    """A socket connected to the first of the host's addresses that takes it. They share one allowance."""
    *others, last = socket.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, address in others:
        with suppress(OSError):
            return _connect(socket.socket(family, kind, protocol), address, allowance, begun)
    family, kind, protocol, _, address = last
    return _connect(socket.socket(family, kind, protocol), address, allowance, begun)


def _connect(connection: socket.socket, address: Any, allowance: Allowance, begun: float) -> socket.socket:
    try:
        _limit(connection, allowance, "connect", begun)
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _limit(connection: socket.socket, allowance: Allowance, step: str, begun: float | None = None) -> None:
    """Let the next operation take what is left for this step, which may have begun before."""
    seconds = allowance.seconds(step, 0.0 if begun is None else time.monotonic() - begun)
    connection.settimeout(seconds if seconds is None else max(seconds, _LEAST))


def _ready(connection: socket.socket, events: int, seconds: float | None) -> int:
    """Which of these events came within so many seconds; 0 for none."""
    with _Selector() as selector:
        selector.register(connection, events)
        return sum(mask for _, mask in selector.select(seconds))


def _watching(connection: socket.socket) -> Callable[[], bool]:
    """A function that says at once whether something has come, be it data or the end."""
    descriptor = connection.fileno()  # stays the same beneath TLS
    if not hasattr(select, "poll"):  # as on Windows
        return lambda: bool(select.select([descriptor], [], [], 0)[0])
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return lambda: bool(poll.poll(0))

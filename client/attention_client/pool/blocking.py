"""``Pool``: connections for ``httpx.Client``, shared by threads."""

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import httpx

from attention_client.pool.allowance import Allowance
from attention_client.pool.http1 import LAST_CHUNK, PACKET, SCRATCH, Answer, as_chunk, head_of, is_chunked
from attention_client.pool.kept import DEFAULT_LIMITS, Kept
from attention_client.pool.origin import TLS, Origin

_LEAST: Final = 1e-3
"""Seconds that a step gets where none are left: a socket takes 0 for never waiting, which is another error."""


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
        self._last = time.monotonic()
        self._scratch = memoryview(bytearray(SCRATCH))
        try:
            self._socket = socket.create_connection((origin.host, origin.port), allowance.seconds("connect"))
        except TimeoutError as fault:
            raise httpx.ConnectTimeout("", request=request) from fault
        except OSError as fault:
            raise httpx.ConnectError(str(fault), request=request) from fault
        self._has_news = _watching(self._socket)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if origin.secure:
                self._socket.settimeout(allowance.seconds("connect"))
                self._socket = tls.context.wrap_socket(self._socket, server_hostname=origin.server_name)
        except TimeoutError as fault:
            self._socket.close()
            raise httpx.ConnectTimeout("", request=request) from fault
        except OSError as fault:  # and ssl's, which are of this class
            self._socket.close()
            raise httpx.ConnectError(str(fault), request=request) from fault

    def is_usable(self, expiry: float | None) -> bool:
        """Whether it has not waited too long, and the server has neither closed it nor said anything unasked."""
        if expiry is not None and time.monotonic() - self._last > expiry:
            return False
        return not self._has_news()

    def exchange(self, request: httpx.Request, allowance: Allowance) -> Answer:
        """Send the request and receive the answer."""
        broken: OSError | None = None
        try:
            self._send(request, allowance)
        except TimeoutError as fault:
            raise httpx.WriteTimeout("", request=request) from fault
        except OSError as fault:
            broken = fault  # a server may refuse a body that it has not read to its end: see what it says
        answer = Answer(request, self._scratch)
        try:
            self._receive(answer, allowance)
        except TimeoutError as fault:
            raise httpx.ReadTimeout("", request=request) from fault
        except OSError as fault:
            raise httpx.ReadError(str(broken or fault), request=request) from fault
        if broken is not None:
            answer.reusable = False
        self._last = time.monotonic()
        return answer

    def _send(self, request: httpx.Request, allowance: Allowance) -> None:
        chunked = is_chunked(request)
        waiting, size = [head_of(request)], 0
        assert isinstance(request.stream, httpx.SyncByteStream)  # noqa: S101 - httpx.Client sees to it
        for piece in request.stream:
            data = as_chunk(piece) if chunked else piece
            size += len(data)
            if size <= PACKET:
                waiting.append(data)
                continue
            if waiting:
                self._write(b"".join(waiting), allowance)
                waiting = []
            self._write(data, allowance)
        if chunked:
            waiting.append(LAST_CHUNK)
        if waiting:
            self._write(b"".join(waiting), allowance)

    def _write(self, data: bytes, allowance: Allowance) -> None:
        seconds = allowance.seconds("write")
        self._socket.settimeout(seconds if seconds is None else max(seconds, _LEAST))
        self._socket.sendall(data)

    def _receive(self, answer: Answer, allowance: Allowance) -> None:
        while not answer.complete:
            seconds = allowance.seconds("read")
            self._socket.settimeout(seconds if seconds is None else max(seconds, _LEAST))
            count = self._socket.recv_into(answer.room())
            if count:
                answer.received(count)
            else:
                answer.ended()

    def close(self) -> None:
        """Close it at once."""
        with suppress(OSError):
            self._socket.close()


def _watching(connection: socket.socket) -> Callable[[], bool]:
    """A function that says at once whether something has come, be it data or the end."""
    descriptor = connection.fileno()  # stays the same beneath TLS
    if not hasattr(select, "poll"):  # as on Windows
        return lambda: bool(select.select([descriptor], [], [], 0)[0])
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return lambda: bool(poll.poll(0))

"""``AsyncPool``: connections for ``httpx.AsyncClient`` on asyncio's event loop, or uvloop's."""

import asyncio
import ssl
from typing import Any, Final, Literal, cast

import httpx

from attention_client.pool.allowance import Allowance
from attention_client.pool.http1 import PACKET, SCRATCH, Answer, Body, head_of
from attention_client.pool.kept import DEFAULT_LIMITS, Kept
from attention_client.pool.origin import TLS, Origin

_TOO_LATE = {"write": httpx.WriteTimeout, "read": httpx.ReadTimeout}
_LOOKS: Final = 4
"""How often it is looked whether the socket has taken more, within the time that is left for a write."""
_LEAST: Final = 1e-3
"""Seconds between two looks."""


class AsyncPool(httpx.AsyncBaseTransport):
    """``Pool``, awaited: the same arguments and the same behaviour, for the event loops of asyncio."""

    def __init__(
        self,
        *,
        verify: ssl.SSLContext | str | bool = True,
        trust_env: bool = True,
        limits: httpx.Limits = DEFAULT_LIMITS,
    ) -> None:
        self._tls = TLS(verify, trust_env)
        self._kept: Kept[_Connection] = Kept(limits)
        self._most = limits.max_connections
        self._free: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop that ``_free`` belongs to."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and receive the whole response."""
        allowance = Allowance(request)
        free = self._turns()
        if free is not None:
            await _acquire(free, request, allowance)
        try:
            origin = Origin.of(request)
            connection = self._kept.take(origin) or await self._open(origin, request, allowance)
            try:
                answer = await connection.exchange(request, allowance)
            except BaseException:
                connection.close()
                raise
            if answer.reusable:
                self._kept.put(connection)
            else:
                connection.close()
        finally:
            if free is not None:
                free.release()
        return answer.response()

    def _turns(self) -> asyncio.Semaphore | None:
        """The connections that may be used yet, anew in each event loop: whoever waits binds a semaphore to theirs."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._free = None if self._most is None else asyncio.Semaphore(self._most)
        return self._free

    async def _open(self, origin: Origin, request: httpx.Request, allowance: Allowance) -> "_Connection":
        loop = asyncio.get_running_loop()
        secure = {"ssl": self._tls.context, "server_hostname": origin.server_name} if origin.secure else {}
        try:
            async with asyncio.timeout(allowance.seconds("connect")):
                _, connection = await loop.create_connection(
                    lambda: _Connection(origin, loop), origin.host, origin.port, **cast("dict[str, Any]", secure)
                )
        except TimeoutError as fault:
            raise httpx.ConnectTimeout("", request=request) from fault
        except OSError as fault:  # and ssl's, which are of this class
            raise httpx.ConnectError(str(fault), request=request) from fault
        return connection

    async def aclose(self) -> None:
        """Close the connections that wait for requests."""
        self._kept.close()
        await asyncio.sleep(0)  # in which the loop lets go of them


async def _acquire(free: asyncio.Semaphore, request: httpx.Request, allowance: Allowance) -> None:
    if not free.locked():
        await free.acquire()  # at once
        return
    try:
        async with asyncio.timeout(allowance.seconds("pool")):
            await free.acquire()
    except TimeoutError:
        raise httpx.PoolTimeout("every connection is in use", request=request) from None


class _Connection(asyncio.BufferedProtocol):
    """One connection, used by one request at a time.

    ``_answered`` is the future of the request that is on its way: done when its answer is complete, or with what went
    wrong. While the socket takes no more, ``_writable`` is a future too.
    """

    def __init__(self, origin: Origin, loop: asyncio.AbstractEventLoop) -> None:
        self.origin = origin
        self.waits_since = 0.0
        self._loop = loop
        self._scratch = memoryview(bytearray(SCRATCH))
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._answered: asyncio.Future[None] = loop.create_future()
        self._writable: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last = loop.time()
        """When something was sent or received, by the loop's clock."""
        self._unsent = 0
        """Bytes that the socket had not taken yet when it was last looked."""

    def is_usable(self) -> bool:
        """Whether it is of this event loop and open."""
        if self._transport is None or self._transport.is_closing():
            return False
        return self._loop is asyncio.get_running_loop()

    async def exchange(self, request: httpx.Request, allowance: Allowance) -> Answer:
        """Send the request and receive the answer, which may come before all is sent."""
        answer = self._answer = Answer(request, self._scratch)
        answered = self._answered = self._loop.create_future()
        try:
            sent = await self._send(request, allowance)
            if not answered.done():
                self._watch("read", request, allowance)
            await answered
        finally:
            self._answer = None
            self._rest()
            if not answered.cancel() and not answered.cancelled():
                answered.exception()  # it has been looked at, whatever else was raised
        answer.reusable = answer.reusable and sent
        return answer

    async def _send(self, request: httpx.Request, allowance: Allowance) -> bool:
        """Whether the whole request was sent; no more is where the answer is there already, or nobody listens."""
        body = Body(request)
        waiting, size = [head_of(request)], 0
        assert isinstance(request.stream, httpx.AsyncByteStream)  # noqa: S101 - httpx.AsyncClient sees to it
        async for piece in request.stream:
            data = body.piece(piece)
            size += len(data)
            if size <= PACKET:
                waiting.append(data)
                continue
            if waiting:
                self._write(b"".join(waiting))
                waiting = []
            self._write(data)
            if self._writable is not None:
                self._watch("write", request, allowance)
                await self._writable
                self._rest()
            if self._answered.done():
                return False
        rest = b"".join([*waiting, body.end()])
        if rest:
            self._write(rest)
        return True

    def _write(self, data: bytes) -> None:
        self._last = self._loop.time()
        if self._transport is not None:
            self._transport.write(data)
            self._unsent = self._transport.get_write_buffer_size()

    def _watch(self, step: Literal["write", "read"], request: httpx.Request, allowance: Allowance) -> None:
        """End the request when this step has waited for too long; a write, for the socket to take any more."""
        self._rest()
        if step == "write" and self._transport is not None:
            unsent, self._unsent = self._unsent, self._transport.get_write_buffer_size()
            if self._unsent < unsent:
                self._last = self._loop.time()
        seconds = allowance.seconds(step, self._loop.time() - self._last)
        if seconds is None:
            return
        if seconds > 0:
            look = max(seconds / _LOOKS, _LEAST) if step == "write" else seconds
            self._timer = self._loop.call_later(look, self._watch, step, request, allowance)
        else:
            self._end(_TOO_LATE[step]("", request=request))

    def _rest(self) -> None:
        """Watch no more, as while the caller makes the next piece."""
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, fault: Exception | None = None) -> None:
        """The answer is complete, or it never will be."""
        if not self._answered.done():
            if fault is None:
                self._answered.set_result(None)
            else:
                self._answered.set_exception(fault)
        self.resume_writing()

    def close(self) -> None:
        """Close it at once."""
        if self._transport is not None and not self._loop.is_closed():
            self._transport.abort()

    # ── what the event loop calls ────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch if self._answer is None else self._answer.room()

    def buffer_updated(self, nbytes: int) -> None:
        self._last = self._loop.time()
        if self._answer is None or self._answer.complete:
            self.close()  # nobody asked
            return
        try:
            self._answer.received(nbytes)
        except httpx.RemoteProtocolError as fault:
            self._end(fault)
        else:
            if self._answer.complete:
                self._end()

    def eof_received(self) -> None:
        if self._answer is not None:
            try:
                self._answer.ended()
            except httpx.RemoteProtocolError as fault:
                self._end(fault)
            else:
                self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.complete:
            self._end(httpx.ReadError(str(exc or "the connection was closed"), request=self._answer.request))
        self.resume_writing()

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

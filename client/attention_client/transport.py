"""aiohttp's connections under ``httpx.AsyncClient``; httpx's own cost several times as much at many calls at once.

``httpx_aiohttp`` does the work. It reports every broken connection as a connect timeout, so this module corrects the
errors: a request that cannot have reached the server may be repeated, another one only if that is safe.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final
from weakref import WeakKeyDictionary

import aiohttp
import httpx
import httpx_aiohttp

_ERRORS: Final[tuple[tuple[type[Exception], type[httpx.RequestError]], ...]] = (
    (aiohttp.ClientProxyConnectionError, httpx.ProxyError),
    (aiohttp.ClientHttpProxyError, httpx.ProxyError),
    (aiohttp.ClientConnectorError, httpx.ConnectError),
    (aiohttp.SocketTimeoutError, httpx.ReadTimeout),
    (asyncio.TimeoutError, httpx.ConnectTimeout),
    (aiohttp.InvalidURL, httpx.UnsupportedProtocol),
    (aiohttp.ClientPayloadError, httpx.ReadError),
    (aiohttp.ClientConnectionError, httpx.ReadError),
    (aiohttp.ClientError, httpx.RemoteProtocolError),
)
"""httpx's error for each of aiohttp's; the first that fits counts."""
_CHUNK: Final = 2**18
"""Bytes of a body that are taken at once: as many as asyncio reads, which so are not cut."""
_FAULTS: Final = (httpx.RequestError, aiohttp.ClientError)


def _corrected(fault: Exception, request: httpx.Request) -> Exception:
    """Return httpx's error for one of aiohttp's, which may be the cause of an error that httpx_aiohttp made."""
    cause = (fault.__cause__ if isinstance(fault, httpx.RequestError) else fault) or fault
    kind = next((kind for origin, kind in _ERRORS if isinstance(cause, origin)), None)
    return fault if kind is None else kind(str(cause) or type(cause).__name__, request=request)


class _Stream(httpx.AsyncByteStream):
    """The body of a response, with httpx's errors."""

    def __init__(self, stream: httpx.AsyncByteStream, request: httpx.Request) -> None:
        stream.CHUNK_SIZE = _CHUNK  # type: ignore[attr-defined]  # of httpx_aiohttp's stream
        self._stream = stream
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._stream:
                yield chunk
        except _FAULTS as fault:
            raise _corrected(fault, self._request) from fault

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        except _FAULTS as fault:
            raise _corrected(fault, self._request) from fault


class _Connector(aiohttp.TCPConnector):
    """Connections that can be aborted: a closed one would go on sending what the server does not read."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._transports: WeakKeyDictionary[Any, asyncio.WriteTransport] = WeakKeyDictionary()

    async def _create_connection(self, *args: Any) -> Any:
        made = await super()._create_connection(*args)
        if made.transport is not None:
            self._transports[made] = made.transport
        return made

    def abort(self) -> None:
        """Close every connection at once."""
        for transport in list(self._transports.values()):
            with suppress(AttributeError):  # asyncio's, of a connection that is lost already
                transport.abort()


class AiohttpTransport(httpx_aiohttp.AiohttpTransport):
    """aiohttp's connections with the errors, the cookies and the repeats of httpx. Serves one event loop at a time."""

    _loop: asyncio.AbstractEventLoop | None = None
    _connector: _Connector | None = None

    def get_client(self) -> aiohttp.ClientSession:
        """Make the session that holds the connections. It keeps no cookies, for httpx does."""
        self._connector = _Connector(
            limit=self.limits.max_connections or 0, keepalive_timeout=self.limits.keepalive_expiry, ssl=self.ssl_context
        )
        session = aiohttp.ClientSession(connector=self._connector, cookie_jar=aiohttp.DummyCookieJar())
        session._retry_connection = False  # would repeat a DELETE whose reply was lost
        return session

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and receive the head of its response.

        aiohttp does not limit the time of sending, so the timeout ``write`` limits all of this.
        """
        if self._loop is not asyncio.get_running_loop():
            await self.aclose()
            self.client, self._loop = None, asyncio.get_running_loop()
        if request.url.userinfo:  # httpx has made it a header, and aiohttp refuses both
            request.url = request.url.copy_with(userinfo=b"")
        try:
            async with asyncio.timeout(request.extensions.get("timeout", {}).get("write")):
                response = await super().handle_async_request(request)
        except TimeoutError:
            raise httpx.TimeoutException("", request=request) from None
        except _FAULTS as fault:
            raise _corrected(fault, request) from fault
        assert isinstance(response.stream, httpx.AsyncByteStream)  # noqa: S101
        response.stream = _Stream(response.stream, request)
        return response

    async def aclose(self) -> None:
        """Close the connections."""
        await super().aclose()
        if self._connector is not None and self._loop is asyncio.get_running_loop():
            self._connector.abort()
            await asyncio.sleep(0)  # in which the loop lets go of them


class AiohttpClient(httpx.AsyncClient):
    """``httpx.AsyncClient`` over aiohttp's connections, also to the proxies that the environment names."""

    def _init_transport(  # type: ignore[override]
        self, transport: httpx.AsyncBaseTransport | None = None, **options: Any
    ) -> httpx.AsyncBaseTransport:
        return AiohttpTransport(**options) if transport is None else transport

    def _init_proxy_transport(  # type: ignore[override]
        self, proxy: httpx.Proxy, **options: Any
    ) -> httpx.AsyncBaseTransport:
        return AiohttpTransport(proxy=proxy, **options)

"""``AsyncClient``: every call of the service as an awaited method.

The methods that make calls are those of ``Client``.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, Self, TypeVar, cast

import anyio
import httpx

from attention_client import replies
from attention_client.calls.base import Call, ReplyT
from attention_client.calls.method import Awaited
from attention_client.client_base import CallExchange, ClientBase
from attention_client.large_bodies import received_in_chunks
from attention_client.many_requests import Errors, Many, bar, in_tasks
from attention_client.plots import AsyncPlot
from attention_client.raw_responses import RawResponse, keeping
from attention_client.retry import Attempts
from attention_contract.errors import AttentionError

P = ParamSpec("P")
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class AsyncBody(httpx.AsyncByteStream):
    """A body in chunks that can be sent again; none is sent after the deadline."""

    chunks: list[bytes | memoryview]
    attempts: Attempts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            self.attempts.check()
            yield cast("bytes", chunk)


class AsyncClient(ClientBase[Awaited, httpx.AsyncClient, httpx.AsyncBaseTransport, AsyncPlot]):
    """The awaited client: the arguments and the methods of ``Client``. Share one in each event loop.

    Its connections are those of aiohttp, beneath httpx. Under trio, give it httpx's own: a ``transport``
    ``httpx.AsyncHTTPTransport()``.
    """

    _awaits = True
    _plots = AsyncPlot

    def _connections(self, transport: httpx.AsyncBaseTransport | None, **settings: Any) -> httpx.AsyncClient:
        if transport is not None:
            return httpx.AsyncClient(transport=transport, **settings)
        from attention_client.transport import AiohttpClient  # noqa: PLC0415 - the blocking client needs no aiohttp

        return AiohttpClient(**settings)

    async def send(self, call: Call[ReplyT]) -> ReplyT:
        """Send a call that ``attention_client.calls`` built, and return its reply."""
        return await self._tried(CallExchange.of(call, self._policy), self._whole)

    async def pieces(self, call: Call[ReplyT]) -> AsyncIterator[ReplyT]:
        """Send a call whose reply comes as server-sent events, and yield each when it comes.

        A fault before the first one is repeated as by ``send``.
        """
        exchange = CallExchange.of(call, self._policy)
        response = await self._tried(exchange, self._begun)
        try:
            async for line in response.aiter_lines():
                exchange.attempts.check()
                if (piece := replies.piece_of(call, response, line)) is not None:
                    yield piece
        except httpx.RequestError as fault:
            raise exchange.attempts.error(fault, response) from fault
        finally:
            await response.aclose()

    async def _tried(
        self,
        exchange: CallExchange[ReplyT],
        receive: Callable[[CallExchange[ReplyT], httpx.Response], Awaitable[AnswerT]],
    ) -> AnswerT:
        """Send the request until an attempt is received without a fault, or the attempts end."""
        while True:
            response = None
            try:
                response = await self._http.send(exchange.request(self._http, self._address, AsyncBody), stream=True)
                return await receive(exchange, response)
            except (AttentionError, httpx.RequestError) as fault:
                seconds = exchange.attempts.wait_after(fault, response)
            await anyio.sleep(seconds)

    @staticmethod
    async def _whole(exchange: CallExchange[ReplyT], response: httpx.Response) -> ReplyT:
        """The reply. Raises the error that the response holds."""
        try:
            content = await received_in_chunks(response, exchange.attempts.check)
        finally:
            await response.aclose()
        return exchange.reply(response, content)

    async def _begun(self, exchange: CallExchange[ReplyT], response: httpx.Response) -> httpx.Response:
        """The response whose pieces are still to come. Raises the error that it holds."""
        if not response.is_success:
            await self._whole(exchange, response)
        return response

    async def raw(
        self, method: Callable[P, Awaitable[AnswerT]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RawResponse[AnswerT]:
        """Call a method of this client and return status, headers and body of the response beside the reply.

        ``client.raw(client.forward, "demo", tokens)``. An error is raised as by the method itself.
        """
        with keeping() as kept:
            return kept.beside(await method(*args, **kwargs))

    async def map(
        self, method: Callable[..., Awaitable[AnswerT]], requests: Iterable[Mapping[str, Any]], *, concurrency: int = 8,
        errors: Errors = "raise", progress: bool = False,
    ) -> list[AnswerT]:  # fmt: skip
        """Call a method once for the arguments of each request, and return the replies in the same order.

        ``client.map(client.forward, [{"name": "demo", "query": tokens}, …])``. At most ``concurrency`` calls run at
        once; requests are taken as they are needed. By default the first error is raised, in the order of the requests:
        calls that run then are awaited, and no other is begun. With ``errors="return"`` an AttentionError stands in the
        place of its reply. ``progress`` draws a bar on standard error, and needs rich.
        """
        many = Many[AnswerT](requests, concurrency, errors)
        with bar(requests, shown=progress) as advance:
            return await in_tasks(many, method, advance)

    async def aclose(self) -> None:
        """Close the connections. Those of ``http`` stay open."""
        if self._owns_http:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

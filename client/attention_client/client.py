"""``Client``: every call of the service as a blocking method.

The methods that make calls are stated in ``calls``; ``send`` sends what they build. ``AsyncClient`` has the same ones.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, Self, TypeVar, cast

import httpx

from attention_client import replies
from attention_client.calls.base import Call, ReplyT
from attention_client.calls.method import Blocking
from attention_client.client_base import CallExchange, ClientBase
from attention_client.large_bodies import received
from attention_client.many_requests import Errors, Many, bar, in_threads
from attention_client.plots import Plot
from attention_client.raw_responses import RawResponse, keeping
from attention_client.retry import Attempts
from attention_contract.errors import AttentionError

P = ParamSpec("P")
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class RepeatableBody(httpx.SyncByteStream):
    """A body in chunks that can be sent again; none is sent after the deadline."""

    chunks: list[bytes | memoryview]
    attempts: Attempts

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.chunks:
            self.attempts.check()
            yield cast("bytes", chunk)


class Client(ClientBase[Blocking, httpx.Client, httpx.BaseTransport, Plot]):
    """A blocking client of one server. Threads may share it; it keeps its connections open until ``close``.

    ``base_url`` is by default the environment's ``ATTENTION_URL``, else ``http://127.0.0.1:8000``. ``timeout`` is the
    seconds that a whole call may take, its attempts and the waits between them included; None is no limit.
    ``retries`` is how often a call is repeated after a transient failure: no connection, a connection that broke during
    an operation that is safe to repeat, or a server that is overloaded or unavailable. By default a call is repeated
    until its waits add up to 40 seconds. Each repeat is logged as a warning of the logger ``attention_client``.
    ``media_type`` is how tensors travel: ``"safetensors"``, as they lie in memory, or ``"json"``. ``headers`` go with
    every request. ``api_key`` is by default the environment's ``ATTENTION_API_KEY``; it is never printed.
    ``transport`` is one of httpx's: a Unix socket, a test's mock, other TLS settings. ``http`` is an httpx client of
    the caller's, with its own authentication, hooks, cookies, timeouts, limits, proxies; it stays open.

    Every method raises an AttentionError; ``attention_client.errors`` lists those that are the client's own.

    Shapes: B batch, H heads, Hkv key/value heads, Lq queries, Lk keys (the past included), P past keys, D width of a
    head, Dv width of a head's values. B may be missing, and is then missing in the reply.
    """

    _plots = Plot

    def _connections(self, transport: httpx.BaseTransport | None, **settings: Any) -> httpx.Client:
        return httpx.Client(transport=transport, **settings)

    def send(self, call: Call[ReplyT]) -> ReplyT:
        """Send a call that ``attention_client.calls`` built, and return its reply."""
        return self._tried(CallExchange.of(call, self._policy), self._whole)

    def pieces(self, call: Call[ReplyT]) -> Iterator[ReplyT]:
        """Send a call whose reply comes as server-sent events, and yield each when it comes.

        A fault before the first one is repeated as by ``send``.
        """
        exchange = CallExchange.of(call, self._policy)
        response = self._tried(exchange, self._begun)
        try:
            for line in response.iter_lines():
                exchange.attempts.check()
                if (piece := replies.piece_of(call, response, line)) is not None:
                    yield piece
        except httpx.RequestError as fault:
            raise exchange.attempts.error(fault, response) from fault
        finally:
            response.close()

    def _tried(
        self, exchange: CallExchange[ReplyT], receive: Callable[[CallExchange[ReplyT], httpx.Response], AnswerT]
    ) -> AnswerT:
        """Send the request until an attempt is received without a fault, or the attempts end."""
        while True:
            response = None
            try:
                response = self._http.send(exchange.request(self._http, self._address, RepeatableBody), stream=True)
                return receive(exchange, response)
            except (AttentionError, httpx.RequestError) as fault:
                seconds = exchange.attempts.wait_after(fault, response)
            time.sleep(seconds)

    @staticmethod
    def _whole(exchange: CallExchange[ReplyT], response: httpx.Response) -> ReplyT:
        """The reply. Raises the error that the response holds."""
        try:
            content = received(response, exchange.attempts.check)
        finally:
            response.close()
        return exchange.reply(response, content)

    def _begun(self, exchange: CallExchange[ReplyT], response: httpx.Response) -> httpx.Response:
        """The response whose pieces are still to come. Raises the error that it holds."""
        if not response.is_success:
            self._whole(exchange, response)
        return response

    def raw(self, method: Callable[P, AnswerT], /, *args: P.args, **kwargs: P.kwargs) -> RawResponse[AnswerT]:
        """Call a method of this client and return status, headers and body of the response beside the reply.

        ``client.raw(client.forward, "demo", tokens)``. An error is raised as by the method itself.
        """
        with keeping() as kept:
            return kept.beside(method(*args, **kwargs))

    def map(
        self, method: Callable[..., AnswerT], requests: Iterable[Mapping[str, Any]], *, concurrency: int = 8,
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
            return in_threads(many, method, advance)

    def close(self) -> None:
        """Close the connections. Those of ``http`` stay open."""
        if self._owns_http:
            self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""``Client`` and ``AsyncClient``: the same calls, blocking and awaited."""

import inspect
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Mapping
from functools import update_wrapper
from importlib.metadata import version
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar, cast

import httpx

from attention_client import calls, replies
from attention_client.calls import Call, ReplyT
from attention_client.exchange import AwaitedBody, BlockingBody, Collected, Exchange, MediaType, Policy
from attention_client.pool import AsyncPool, Pool
from attention_client.route import Route, base_url_of, check_apart, is_proxied
from attention_contract.base import WireModel
from attention_contract.errors import AttentionError

P = ParamSpec("P")
R = TypeVar("R", bound=WireModel | None)

USER_AGENT: Final = f"attention-client/{version('attention-service')}"


def _sync(make: Callable[P, Call[R]]) -> "Callable[Concatenate[Client, P], R]":
    """The blocking method that makes this call and sends it."""

    def method(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.send(make(*args, **kwargs))

    return _named_after(make, method)


def _async(make: Callable[P, Call[R]]) -> "Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]]":
    """The awaited method that makes this call and sends it."""

    async def method(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.send(make(*args, **kwargs))

    return _named_after(make, method)


M = TypeVar("M", bound=Callable[..., Any])


def _named_after(make: Callable[..., Any], method: M) -> M:
    """The method with the name, the documentation and the signature of the call that it makes."""
    signature = inspect.signature(make)
    myself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    update_wrapper(method, make)
    method.__dict__["__signature__"] = signature.replace(
        parameters=[myself, *signature.parameters.values()], return_annotation=inspect.Signature.empty
    )
    return method


class Client:
    """A blocking client of one server. Safe to share between threads; keeps its connections open until ``close``.

    ``base_url`` is by default the environment's ``ATTENTION_URL``, else ``http://127.0.0.1:8000``. ``timeout`` is the
    seconds that a whole call may take, its attempts and the waits between them included; None waits for ever.
    ``retries`` is how often a call is repeated after a transient failure: no connection, a connection that broke during
    an operation that is safe to repeat, or a server that is overloaded or unavailable. ``media_type`` is how tensors
    travel: ``"safetensors"``, as they lie in memory, or ``"json"``. ``headers`` go with every request. ``transport``
    is httpx's: a Unix socket, a test's mock, other TLS settings; by default ``attention_client.pool.Pool``. ``http`` is
    an httpx client that is all set up, and stays the caller's: authentication, hooks, cookies, timeouts, limits.
    Retries are logged by ``stamina.instrumentation``.

    Every method raises an AttentionError; ``attention_client.errors`` lists those that are the client's own.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        timeout: float | None = 60.0,
        retries: int = 3,
        media_type: MediaType = "safetensors",
        headers: Mapping[str, str] | None = None,
        transport: httpx.BaseTransport | None = None,
        http: httpx.Client | None = None,
    ) -> None:
        self._policy = Policy(timeout, retries, media_type)
        self._own = http is None
        if http is not None:
            check_apart(headers=headers, transport=transport)
            self._route: Route[httpx.Client, Pool] = Route.through(http, base_url)
            return
        url = base_url_of(base_url)
        if transport is None and not is_proxied(url):
            transport = Pool()
        own = {"User-Agent": USER_AGENT, **(headers or {})}
        self._route = Route(
            httpx.Client(base_url=url, headers=own, timeout=None, transport=transport),  # noqa: S113 - a deadline holds
            transport if isinstance(transport, Pool) and not url.userinfo else None,
        )

    def send(self, call: Call[ReplyT]) -> ReplyT:
        """Send a call of ``attention_client.calls`` and return its reply."""
        exchange = Exchange(call, self._policy)
        try:
            return self._attempt(exchange)
        except AttentionError as fault:
            failed: AttentionError | None = fault
        for attempt in exchange.attempts():  # the first of which has been made
            with attempt:
                first, failed = failed, None
                if first is not None:
                    raise first
                return self._attempt(exchange)
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, exchange: Exchange[ReplyT]) -> ReplyT:
        collected = Collected()
        response: httpx.Response | None = None
        try:
            request = self._route.request(exchange, BlockingBody(exchange.chunks) if exchange.pieces else None)
            response = self._deliver(request)
            try:
                chunks = response.iter_bytes() if "content-encoding" in response.headers else response.stream
                for chunk in cast("Iterable[bytes]", chunks):
                    exchange.check()
                    collected.add(chunk)
            finally:
                response.close()
        except httpx.RequestError as fault:
            raise exchange.error(fault, response) from fault
        return replies.read(exchange.call.operation, response, collected.body)

    def _deliver(self, request: httpx.Request) -> httpx.Response:
        pool = self._route.straight()
        if pool is None:
            return self._route.http.send(request, stream=True)
        response = pool.handle_request(request)
        self._route.learn(response)
        return response

    def close(self) -> None:
        """Close the connections. Those of ``http`` stay, as it is the caller's."""
        if self._own:
            self._route.http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    server_info = _sync(calls.server_info)
    list_variants = _sync(calls.list_variants)
    health_live = _sync(calls.health_live)
    health_ready = _sync(calls.health_ready)
    list_modules = _sync(calls.list_modules)
    create_module = _sync(calls.create_module)
    import_module = _sync(calls.import_module)
    get_module = _sync(calls.get_module)
    delete_module = _sync(calls.delete_module)
    list_parameters = _sync(calls.list_parameters)
    get_parameter = _sync(calls.get_parameter)
    replace_parameters = _sync(calls.replace_parameters)
    forward = _sync(calls.forward)
    weights = _sync(calls.weights)
    gradients = _sync(calls.gradients)
    complexity = _sync(calls.complexity)
    complexity_picture = _sync(calls.complexity_picture)
    raw_forward = attend = _sync(calls.raw_forward)
    raw_weights = _sync(calls.raw_weights)
    raw_gradients = _sync(calls.raw_gradients)
    raw_complexity = _sync(calls.raw_complexity)
    raw_complexity_picture = _sync(calls.raw_complexity_picture)
    accuracy = _sync(calls.accuracy)
    list_hardware = _sync(calls.list_hardware)
    hopfield_retrieve = _sync(calls.hopfield_retrieve)


class AsyncClient:
    """The awaited client: the arguments and the methods of ``Client``. Share one in each event loop."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        timeout: float | None = 60.0,
        retries: int = 3,
        media_type: MediaType = "safetensors",
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self._policy = Policy(timeout, retries, media_type)
        self._own = http is None
        if http is not None:
            check_apart(headers=headers, transport=transport)
            self._route: Route[httpx.AsyncClient, AsyncPool] = Route.through(http, base_url)
            return
        url = base_url_of(base_url)
        if transport is None and not is_proxied(url):
            transport = AsyncPool()
        own = {"User-Agent": USER_AGENT, **(headers or {})}
        self._route = Route(
            httpx.AsyncClient(base_url=url, headers=own, timeout=None, transport=transport),  # noqa: S113 - a deadline holds
            transport if isinstance(transport, AsyncPool) and not url.userinfo else None,
        )

    async def send(self, call: Call[ReplyT]) -> ReplyT:
        """Send a call of ``attention_client.calls`` and return its reply."""
        exchange = Exchange(call, self._policy)
        try:
            return await self._attempt(exchange)
        except AttentionError as fault:
            failed: AttentionError | None = fault
        async for attempt in exchange.attempts():  # the first of which has been made
            with attempt:
                first, failed = failed, None
                if first is not None:
                    raise first
                return await self._attempt(exchange)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, exchange: Exchange[ReplyT]) -> ReplyT:
        collected = Collected()
        response: httpx.Response | None = None
        try:
            request = self._route.request(exchange, AwaitedBody(exchange.chunks) if exchange.pieces else None)
            response = await self._deliver(request)
            try:
                chunks = response.aiter_bytes() if "content-encoding" in response.headers else response.stream
                async for chunk in cast("AsyncIterable[bytes]", chunks):
                    exchange.check()
                    collected.add(chunk)
            finally:
                await response.aclose()
        except httpx.RequestError as fault:
            raise exchange.error(fault, response) from fault
        return replies.read(exchange.call.operation, response, collected.body)

    async def _deliver(self, request: httpx.Request) -> httpx.Response:
        pool = self._route.straight()
        if pool is None:
            return await self._route.http.send(request, stream=True)
        response = await pool.handle_async_request(request)
        self._route.learn(response)
        return response

    async def aclose(self) -> None:
        """Close the connections. Those of ``http`` stay, as it is the caller's."""
        if self._own:
            await self._route.http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    server_info = _async(calls.server_info)
    list_variants = _async(calls.list_variants)
    health_live = _async(calls.health_live)
    health_ready = _async(calls.health_ready)
    list_modules = _async(calls.list_modules)
    create_module = _async(calls.create_module)
    import_module = _async(calls.import_module)
    get_module = _async(calls.get_module)
    delete_module = _async(calls.delete_module)
    list_parameters = _async(calls.list_parameters)
    get_parameter = _async(calls.get_parameter)
    replace_parameters = _async(calls.replace_parameters)
    forward = _async(calls.forward)
    weights = _async(calls.weights)
    gradients = _async(calls.gradients)
    complexity = _async(calls.complexity)
    complexity_picture = _async(calls.complexity_picture)
    raw_forward = attend = _async(calls.raw_forward)
    raw_weights = _async(calls.raw_weights)
    raw_gradients = _async(calls.raw_gradients)
    raw_complexity = _async(calls.raw_complexity)
    raw_complexity_picture = _async(calls.raw_complexity_picture)
    accuracy = _async(calls.accuracy)
    list_hardware = _async(calls.list_hardware)
    hopfield_retrieve = _async(calls.hopfield_retrieve)

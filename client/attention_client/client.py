"""``Client`` and ``AsyncClient``: the same calls, blocking and awaited."""

import inspect
import os
from collections.abc import Callable, Coroutine, Mapping
from functools import update_wrapper
from importlib.metadata import version
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

import httpx

from attention_client import calls, replies
from attention_client.calls import Call, ReplyT
from attention_client.exchange import AwaitedBody, BlockingBody, Exchange, MediaType, Policy
from attention_contract.base import WireModel

P = ParamSpec("P")
R = TypeVar("R", bound=WireModel | None)

DEFAULT_URL: Final = "http://127.0.0.1:8000"
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


def _base_url(given: str | None) -> httpx.URL:
    text = given or os.environ.get("ATTENTION_URL") or DEFAULT_URL
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as fault:
        raise ValueError(f"base_url: {text!r} is no URL: {fault}") from None
    if url.scheme not in {"http", "https"} or not url.host:
        raise ValueError(f"base_url: expected something like {DEFAULT_URL}, got {text!r}")
    return url


class Client:
    """A blocking client of one server. Safe to share between threads; keeps its connections open until ``close``.

    ``base_url`` is by default the environment's ``ATTENTION_URL``, else ``http://127.0.0.1:8000``. ``timeout`` is the
    seconds that a whole call may take, its attempts and the waits between them included; None waits for ever.
    ``retries`` is how often a call is repeated after a transient failure: no connection, a connection that broke during
    an operation that is safe to repeat, or a server that is overloaded or unavailable. ``media_type`` is how tensors
    travel: ``"safetensors"``, as they lie in memory, or ``"json"``. ``headers`` go with every request. ``transport``
    is httpx's: a Unix socket, a test's mock, other TLS settings. Retries are logged by ``stamina.instrumentation``.

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
    ) -> None:
        self._policy = Policy(timeout, retries, media_type)
        self._http = httpx.Client(
            base_url=_base_url(base_url), headers={"User-Agent": USER_AGENT, **(headers or {})}, transport=transport
        )

    def send(self, call: Call[ReplyT]) -> ReplyT:
        """Send a call of ``attention_client.calls`` and return its reply."""
        exchange = Exchange(call, self._policy)
        for attempt in exchange.attempts():
            with attempt, exchange.faults():
                response = self._http.send(self._request(exchange), stream=True)
                try:
                    body = bytearray()
                    for chunk in response.iter_bytes():
                        exchange.check()
                        body += chunk
                finally:
                    response.close()
                return replies.read(call.operation, response, body)
        raise AssertionError("the last attempt returns or raises")

    def _request(self, exchange: Exchange[Any]) -> httpx.Request:
        return self._http.build_request(
            exchange.call.operation.method,
            exchange.url,
            params=exchange.params or None,
            headers=exchange.headers,
            content=BlockingBody(exchange.chunks) if exchange.pieces else None,
            timeout=exchange.allowance(),
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        self._http.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.__exit__(kind, fault, trace)

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
    ) -> None:
        self._policy = Policy(timeout, retries, media_type)
        self._http = httpx.AsyncClient(
            base_url=_base_url(base_url), headers={"User-Agent": USER_AGENT, **(headers or {})}, transport=transport
        )

    async def send(self, call: Call[ReplyT]) -> ReplyT:
        """Send a call of ``attention_client.calls`` and return its reply."""
        exchange = Exchange(call, self._policy)
        async for attempt in exchange.attempts():
            with attempt, exchange.faults():
                response = await self._http.send(self._request(exchange), stream=True)
                try:
                    body = bytearray()
                    async for chunk in response.aiter_bytes():
                        exchange.check()
                        body += chunk
                finally:
                    await response.aclose()
                return replies.read(call.operation, response, body)
        raise AssertionError("the last attempt returns or raises")

    def _request(self, exchange: Exchange[Any]) -> httpx.Request:
        return self._http.build_request(
            exchange.call.operation.method,
            exchange.url,
            params=exchange.params or None,
            headers=exchange.headers,
            content=AwaitedBody(exchange.chunks) if exchange.pieces else None,
            timeout=exchange.allowance(),
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, fault, trace)

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

"""``ClientBase``: the settings, connections and groups of calls of a client; ``CallExchange``: one call on its way."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar, Unpack

import httpx
from pydantic import SecretStr

from attention_client import replies
from attention_client.calls.base import Call, CallOptions, HttpMessage, MediaType, ReplyT
from attention_client.calls.method import Sender, WayT
from attention_client.calls.question_calls import Questions
from attention_client.connection_settings import (
    LIMITS,
    ApiKey,
    StreamSettings,
    address_of,
    all_headers,
    given_alone,
    server_url,
    trusted_by,
)
from attention_client.plots import AsyncPlot, Plot, picture_request
from attention_client.raw_responses import kept_response
from attention_client.retry import Attempts, CallPolicy
from attention_client.trace_context import trace_requests
from attention_contract.schemas.picture_options import PictureFields, PictureFormat

if TYPE_CHECKING:
    from attention_client.calls.attention_calls import Attention, Hopfield
    from attention_client.calls.model_calls import Models
    from attention_client.calls.module_calls import Checkpoints, Modules
    from attention_client.calls.pass_calls import Passes
    from attention_client.calls.recording_calls import Recordings
    from attention_client.calls.server_calls import Server
    from attention_client.calls.session_calls import Sessions
    from attention_client.calls.vector_calls import Vectors

Chunks = list[bytes | memoryview]
HttpT = TypeVar("HttpT", httpx.Client, httpx.AsyncClient)
TransportT = TypeVar("TransportT", httpx.BaseTransport, httpx.AsyncBaseTransport)
PlotT = TypeVar("PlotT", Plot, AsyncPlot)


@dataclass(frozen=True)
class CallExchange(Generic[ReplyT]):
    """One call on its way: its message, and the attempts to send that and to receive the reply."""

    call: Call[ReplyT]
    message: HttpMessage
    headers: Mapping[str, str]
    attempts: Attempts

    @classmethod
    def of(cls, call: Call[ReplyT], policy: CallPolicy) -> "CallExchange[ReplyT]":
        """Encode a call under the policy of its client."""
        if (picture := picture_request.get()) is not None:
            call = picture.drawn(call)
        policy = policy.changed(call.options)
        message = call.encode(policy.media_type)
        attempts = Attempts(call.operation, policy.timeout, policy.retries)
        return cls(call, message, {**message.headers, **policy.headers}, attempts)

    def request(
        self, http: httpx.Client | httpx.AsyncClient, address: str, body: Callable[[Chunks, Attempts], Any]
    ) -> httpx.Request:
        """Make the request of one attempt. ``body`` makes one of several chunks."""
        chunks = self.message.chunks
        content: Any = None if not chunks else chunks[0] if len(chunks) == 1 else body(chunks, self.attempts)
        return http.build_request(
            self.message.method,
            address + self.message.url,
            params=self.message.params or None,
            headers={**self.attempts.preference(), **self.headers},
            content=content,
            extensions={"timeout": self.attempts.timeouts(http.timeout)},
        )

    def reply(self, response: httpx.Response, content: bytearray | memoryview) -> ReplyT:
        """Read the reply of a response. Raises the error that it holds."""
        self.attempts.answered(self.message.method, self.message.url, response)
        if (kept := kept_response.get()) is not None:
            kept.response, kept.body = response, bytes(content)
        return replies.read(self.call, response, content)


def _group(module: str, kind: str) -> Any:
    """Return the property that makes a group of calls at its first use, and imports its schemas no sooner."""

    def make(client: Sender[Any]) -> Any:
        return getattr(import_module(f"attention_client.calls.{module}"), kind)(client)

    return cached_property(make)


class ClientBase(Questions[WayT], Sender[WayT], Generic[WayT, HttpT, TransportT, PlotT]):
    """The settings, the connections and the groups of both clients."""

    _plots: type[PlotT]
    attention: "Attention[WayT]" = _group("attention_calls", "Attention")
    checkpoints: "Checkpoints[WayT]" = _group("module_calls", "Checkpoints")
    hopfield: "Hopfield[WayT]" = _group("attention_calls", "Hopfield")
    models: "Models[WayT]" = _group("model_calls", "Models")
    modules: "Modules[WayT]" = _group("module_calls", "Modules")
    passes: "Passes[WayT]" = _group("pass_calls", "Passes")
    recordings: "Recordings[WayT]" = _group("recording_calls", "Recordings")
    server: "Server[WayT]" = _group("server_calls", "Server")
    sessions: "Sessions[WayT]" = _group("session_calls", "Sessions")
    vectors: "Vectors[WayT]" = _group("vector_calls", "Vectors")

    def __init__(
        self,
        base_url: str | None = None,
        *,
        timeout: float | None = 60.0,
        retries: int | None = None,
        media_type: MediaType = "safetensors",
        headers: Mapping[str, str] | None = None,
        api_key: ApiKey | None = None,
        transport: TransportT | None = None,
        http: HttpT | None = None,
    ) -> None:
        self._policy = CallPolicy(timeout, retries, media_type)
        self._owns_http = http is None
        given_alone(http, headers=headers, api_key=api_key, transport=transport)
        self._http: HttpT = http or self._connections(
            transport,
            base_url=(url := server_url(base_url)),
            verify=trusted_by(url),
            headers=all_headers(headers, api_key),
            limits=LIMITS,
            timeout=None,  # each attempt gets the time until the deadline
        )
        self._address = address_of(self._http, base_url)
        if self._owns_http:
            trace_requests(self._http)
        self.settings: dict[str, Any] | None = None
        """The arguments for another client like this one, to be made in another process; None with ``transport`` or
        ``http``, which belong to this one."""
        if transport is None and http is None:
            self.settings = {"base_url": str(self._http.base_url), "timeout": timeout, "retries": retries}
            self.settings |= {"media_type": media_type, "headers": dict(headers or {})}
            if api_key is not None:
                self.settings["api_key"] = api_key if isinstance(api_key, SecretStr) else SecretStr(api_key)

    @abstractmethod
    def _connections(self, transport: TransportT | None, **settings: Any) -> HttpT:
        """Make the httpx client of this client."""

    def with_options(self, **options: Unpack[CallOptions]) -> Self:
        """Return a client with other settings for every call. It shares this client's connections, which this closes.

        ``timeout``, ``retries`` and ``headers`` as each method takes them; headers are added to those of this client.
        """
        made = copy(self)
        made._policy = self._policy.changed(options)
        made._owns_http = False
        if made.settings is not None:
            kept = {"timeout": made._policy.timeout, "retries": made._policy.retries}
            made.settings = made.settings | kept | {"headers": made.settings["headers"] | dict(made._policy.headers)}
        for name in GROUPS:
            made.__dict__.pop(name, None)  # the groups of this client send by its own settings
        return made

    def plot(self, format: PictureFormat = "svg", **fields: Unpack[PictureFields]) -> PlotT:  # noqa: A002
        """Return a plot: ``.of(method, *args)`` is the picture of a method's reply, drawn by the server.

        ``client.plot("png", view="head", head=3, theme="dark").of(client.weights, "demo", tokens)``, awaited or not.
        ``view``: ``heads``, ``head``, ``lines`` or ``statistics`` of weights. ``width`` in pixels, ``dpi`` in pixels an
        inch. ``palette``: viridis, cividis, magma, inferno, plasma; of differences blue_orange, rdbu, puor, brbg,
        berlin, vanimo.
        ``scale`` of the colours: ``auto``, ``linear`` or ``log``. ``sequence`` of the batch. Raises InvalidRequest.
        """
        return self._plots.stated(format, fields)

    def stream_settings(self) -> StreamSettings:
        """Return address, headers and policy of the streams that belong to this client."""
        return StreamSettings.of(self._http, self._address, self._policy)


GROUPS: Final = tuple(name for name, member in vars(ClientBase).items() if isinstance(member, cached_property))
"""The attributes of a client that are groups of calls."""

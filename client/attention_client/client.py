"""``Client``: every call of the service as a blocking method.

A method hands its arguments, ``locals()``, to ``calls``, which builds the call; ``send`` sends it. ``AsyncClient`` has
the same methods, and a test compares the two.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, TypeVar, Unpack, cast

import httpx
from pydantic import SecretStr

from attention_client import replies
from attention_client.arguments import (
    AlternativeLike,
    DropoutLike,
    EditLike,
    ReadoutLike,
    SelectLike,
    SessionShapeLike,
    ShapeLike,
    StatisticOptionsLike,
    SweepLike,
    SweptEditLike,
    TensorMap,
)
from attention_client.array_likes import TensorLike
from attention_client.calls import Call, CallOptions, MediaType, Message, ReplyT, call, sized
from attention_client.connection_settings import (
    LIMITS,
    ApiKey,
    Policy,
    StreamSettings,
    address_of,
    all_headers,
    given_alone,
    server_url,
)
from attention_client.many_requests import Errors, Many, bar, in_threads
from attention_client.plots import Plot, drawn
from attention_client.raw_responses import RawResponse, keeping, note
from attention_client.resources.attention_calls import Attention
from attention_client.resources.checkpoint_calls import Checkpoints
from attention_client.resources.hopfield_calls import Hopfield
from attention_client.resources.module_calls import Modules
from attention_client.resources.pass_calls import Passes
from attention_client.resources.recording_calls import Recordings
from attention_client.resources.server_calls import Server
from attention_client.resources.session_calls import Sessions
from attention_client.retry import Attempts
from attention_client.trace_context import trace_requests
from attention_contract import operations
from attention_contract.errors import AttentionError
from attention_contract.schemas.attention import ForwardReply, KernelName, Tap
from attention_contract.schemas.attribution import AttributionMethod, AttributionReply
from attention_contract.schemas.circuits import CircuitPart, CircuitsReply
from attention_contract.schemas.complexity import ComplexityReply
from attention_contract.schemas.effects import EffectsReply
from attention_contract.schemas.gradients import GradientsReply
from attention_contract.schemas.picture_options import PictureFields, PictureFormat
from attention_contract.schemas.weights import StatisticName, WeightsReply

P = ParamSpec("P")
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class Body(httpx.SyncByteStream):
    """A body in chunks that can be sent again; none is sent after the deadline."""

    chunks: list[bytes | memoryview]
    attempts: Attempts

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.chunks:
            self.attempts.check()
            yield cast("bytes", chunk)


class Client:
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

    def __init__(
        self,
        base_url: str | None = None,
        *,
        timeout: float | None = 60.0,
        retries: int | None = None,
        media_type: MediaType = "safetensors",
        headers: Mapping[str, str] | None = None,
        api_key: ApiKey | None = None,
        transport: httpx.BaseTransport | None = None,
        http: httpx.Client | None = None,
    ) -> None:
        self._policy = Policy(timeout, retries, media_type)
        self._owns_http = http is None
        given_alone(http, headers=headers, api_key=api_key, transport=transport)
        self._http = http or httpx.Client(
            base_url=server_url(base_url),
            headers=all_headers(headers, api_key),
            limits=LIMITS,
            timeout=None,  # noqa: S113 - each attempt gets the time until the deadline
            transport=transport,
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
        self._group()

    def _group(self) -> None:
        """Make the groups of calls, which are sent by this client."""
        self.attention = Attention(self)
        self.checkpoints = Checkpoints(self)
        self.hopfield = Hopfield(self)
        self.modules = Modules(self)
        self.passes = Passes(self)
        self.recordings = Recordings(self)
        self.server = Server(self)
        self.sessions = Sessions(self)

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
        made._group()
        return made

    def stream_settings(self) -> StreamSettings:
        """Return address, headers and policy of the streams that belong to this client."""
        return StreamSettings.of(self._http, self._address, self._policy)

    def send(self, call: Call[ReplyT]) -> ReplyT:
        """Send a call that ``attention_client.calls`` built, and return its reply."""
        call = drawn(call)
        policy = self._policy.changed(call.options)
        attempts = Attempts(call.operation, policy.timeout, policy.retries)
        message = call.encode(policy.media_type)
        headers = {**message.headers, **policy.headers}
        while True:
            try:
                return self._attempt(call, message, headers, attempts)
            except AttentionError as fault:
                seconds = attempts.wait_after(fault)
            time.sleep(seconds)

    def _attempt(self, call: Call[ReplyT], message: Message, headers: Mapping[str, str], attempts: Attempts) -> ReplyT:
        response, content = None, bytearray()
        chunks = message.chunks
        request = self._http.build_request(
            message.method,
            self._address + message.url,
            params=message.params or None,
            headers={**attempts.preference(), **headers},
            content=cast("bytes", chunks[0]) if len(chunks) == 1 else Body(chunks, attempts) if chunks else None,
            extensions={"timeout": attempts.timeouts(self._http.timeout)},
        )
        try:
            response = self._http.send(request, stream=True)
            try:
                for chunk in response.iter_bytes():
                    attempts.check()
                    content += chunk
            finally:
                response.close()
        except httpx.RequestError as fault:
            raise attempts.error(fault, response) from fault
        attempts.answered(message.method, message.url, response)
        note(response, content)
        return replies.read(call, response, content)

    def raw(self, method: Callable[P, AnswerT], /, *args: P.args, **kwargs: P.kwargs) -> RawResponse[AnswerT]:
        """Call a method of this client and return status, headers and body of the response beside the reply.

        ``client.raw(client.forward, "demo", tokens)``. An error is raised as by the method itself.
        """
        with keeping() as kept:
            return kept.beside(method(*args, **kwargs))

    def plot(self, format: PictureFormat = "svg", **fields: Unpack[PictureFields]) -> Plot:  # noqa: A002
        """Return a plot: ``.of(method, *args)`` is the picture of a method's reply, drawn by the server.

        ``client.plot("png", view="head", head=3, theme="dark").of(client.weights, "demo", tokens)``.
        ``view``: ``heads``, ``head``, ``lines`` or ``statistics`` of weights. ``width`` in pixels, ``dpi`` in pixels an
        inch. ``palette``: viridis, cividis, magma, inferno, plasma; of differences rdbu, puor, brbg, berlin, vanimo.
        ``scale`` of the colours: ``auto``, ``linear`` or ``log``. ``sequence`` of the batch. Raises InvalidRequest.
        """
        return Plot.stated(format, fields)

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

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def forward(
        self, name: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        return_: Sequence[Tap] = ("output",), select: SelectLike | None = None, average_heads: bool = False,
        edits: Sequence[EditLike] = (), dropout: DropoutLike | None = None, return_state: bool = False,
        report_error: bool = False, compare: Literal["unedited"] | None = None,
        kernel: KernelName | None = None, parameters: TensorMap | None = None,
        version: str | None = None, **options: Unpack[CallOptions],
    ) -> ForwardReply:  # fmt: skip
        """Return the output of a module and the taps named in ``return_``.

        ``query [B, Lq, d_model]``; ``key [B, Lk − P, key_width]``, by default the query; ``value [B, Lk − P,
        value_width]``, by default the key.
        ``mask``, broadcastable to ``[B, H, Lq, Lk]``: bool, True lets a query look; or float, added to the scores.
        ``key_mask [B, Lk]``, True for a real key; ``key_lengths [B]``, how many keys from the first on are real.
        ``global_mask [B, Lk]``, True for a global token: it sees every key, and every query sees it.
        ``past_key [B, Hkv, P, D]``, ``past_value [B, Hkv, P, Dv]``: projected keys and values of earlier tokens.
        ``offsets [B]`` or a number, added to the index of each query; by default P. ``positions [B, Lq]``: where each
        new token stands in the position encoding.
        ``gate [B, Hkv, Lk]`` or ``[B, Hkv, Lk, D]``, ``beta [B, Hkv, Lk]``, ``initial_state [B, Hkv, F, Dv]`` and
        ``initial_normalizer [B, Hkv, F]`` belong to method ``linear``; ``return_state`` returns its last state.
        ``return_``: q, k, v, scores, capped_scores, masked_scores, weights, context, lse, output.
        ``select {"heads": […], "queries": […]}`` keeps these of the taps; ``average_heads`` averages the weights.
        ``edits``: interventions such as ``{"tap": "weights", "heads": [3], "set": 0}``.
        ``compare="unedited"`` adds ``differences``. ``dropout {"p": 0.1, "seed": 0}``.
        ``report_error`` compares a method with exact attention.
        ``kernel`` is by default the cheapest. ``parameters`` take the place of the module's own in this call alone.
        With a ``version``, answers only if the module is at it.
        """
        return self.send(call(operations.forward, locals()))

    def weights(
        self, name: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        edits: Sequence[EditLike] = (), top_k: int = 0, select: SelectLike | None = None, return_weights: bool = True,
        pool: int | None = None, average_heads: bool = False, query_mask: TensorLike | None = None,
        statistics: Sequence[StatisticName] | None = None, statistic_options: StatisticOptionsLike | None = None,
        compare: Literal["unedited"] | None = None, labels: Sequence[str] | None = None,
        query_labels: Sequence[str] | None = None, kernel: KernelName | None = None,
        parameters: TensorMap | None = None, version: str | None = None, **options: Unpack[CallOptions],
    ) -> WeightsReply:  # fmt: skip
        """Return the weights of each head ``[B, H, Lq, Lk]``, their statistics, and the ``top_k`` keys of each query.

        The statistics are ``[B, H]`` each: entropy in nats, distance in tokens, shares of 1. ``top_k`` is at most
        1,024. ``return_weights=False`` leaves the weights out; ``pool`` returns the largest weight of each square of so
        many queries and keys. ``query_mask [B, Lq]``, True for a query that the
        statistics count. ``statistics`` names them, as in ``["induction"]``; ``statistic_options`` holds window, sinks,
        tokens ``[B, Lk]``, query_tokens ``[B, Lq]``, classes and token_classes. The weights are those after the
        ``edits``; ``compare="unedited"`` adds ``differences``. ``labels`` of the Lk keys and ``query_labels`` stand in
        pictures. The other arguments are those of ``forward``.
        """
        return self.send(call(operations.weights, locals()))

    def attribution(
        self, name: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        methods: Sequence[AttributionMethod] = ("gradient_attention",), upstream: TensorLike | None = None,
        readout: ReadoutLike | None = None, steps: int = 32, edits: Sequence[EditLike] = (),
        select: SelectLike | None = None, compare: Literal["unedited"] | None = None,
        labels: Sequence[str] | None = None, query_labels: Sequence[str] | None = None,
        kernel: KernelName | None = None, parameters: TensorMap | None = None, version: str | None = None,
        **options: Unpack[CallOptions],
    ) -> AttributionReply:  # fmt: skip
        """Return the share of each weight and head in L = Σ output · upstream, one tensor for each method.

        ``methods``: gradient_attention and integrated ``[B, H, Lq, Lk]``, relevance ``[B, Lq, Lk]``, norm ``[B, H, Lq,
        Lk]`` with norm_of_sum ``[B, Lq, Lk]``, head_importance ``[B, H]``. ``upstream`` is ∂L/∂output; by default ones.
        ``readout {"weight": [C, d_model], "bias": [C], "targets": [B, Lq]}`` makes L the log-likelihood of the targets,
        of which −1 counts nothing. ``steps`` are the points of the path of ``integrated``, whose accuracy
        ``completeness`` tells. ``compare="unedited"`` adds ``differences``. The other arguments are those of
        ``weights``.
        """
        return self.send(call(operations.attribution, locals()))

    def gradients(
        self, name: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        wrt: Sequence[str] = ("query",), upstream: TensorLike | None = None, tap_upstream: TensorMap | None = None,
        check: bool = False, directions: TensorMap | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        return_: Sequence[Tap] = ("output",), select: SelectLike | None = None, average_heads: bool = False,
        edits: Sequence[EditLike] = (), dropout: DropoutLike | None = None, return_state: bool = False,
        report_error: bool = False, kernel: KernelName | None = None, parameters: TensorMap | None = None,
        version: str | None = None, **options: Unpack[CallOptions],
    ) -> GradientsReply:  # fmt: skip
        """Return exact gradients ∂L/∂name for each name of ``wrt``: inputs, taps, parameters, or ``"parameters"``.

        ``upstream`` is ∂L/∂output, of the output's shape; by default ones. ``tap_upstream`` is ∂L/∂tap of taps that L
        depends on too. ``check`` compares with central differences in float64. ``directions``, by names of ``wrt`` and
        of their shapes, adds Hessian-vector products.
        The other arguments are those of ``forward``.
        """
        return self.send(call(operations.gradients, locals()))

    def effects(
        self, name: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        sweep: SweptEditLike, edits: Sequence[EditLike] = (), queries: Sequence[int] | None = None,
        direction: TensorLike | None = None, return_differences: bool = False,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        kernel: KernelName | None = None, parameters: TensorMap | None = None, version: str | None = None,
        **options: Unpack[CallOptions],
    ) -> EffectsReply:  # fmt: skip
        """Return the change of a module's output by each edit of a sweep: one edit a head, a query or a key.

        ``sweep {"tap": "context", "over": ["heads"], "set": 0}`` knocks each head out in turn; a ``value`` of the whole
        tap patches each in turn. The effects are ``[B, *swept]``: norm, relative, max, and with a ``direction`` of the
        output's shape the projection on it. ``queries``: those whose outputs are compared. ``edits`` hold throughout.
        ``return_differences`` adds the changes themselves. The other arguments are those of ``forward``.
        """
        return self.send(call(operations.effects, locals()))

    def complexity(
        self, name: str, shape: ShapeLike, sweep: SweepLike | None = None, *, return_: Sequence[Tap] = ("output",),
        kernel: KernelName | None = None, memory_bytes: int | None = None, hardware: str | None = None,
        compare: Sequence[AlternativeLike] = (), session: SessionShapeLike | None = None, measure: bool = False,
        version: str | None = None,
        **options: Unpack[CallOptions],
    ) -> ComplexityReply:  # fmt: skip
        """Return the cost of a module at a shape or over a sweep: FLOPs, bytes, milliseconds, and what fits.

        ``shape {"batch": 1, "queries": 512, "keys": None, "past": 0}``, or a number of queries; ``sweep {"dimension":
        "length", "values": […]}``, or a list of lengths. ``memory_bytes`` supposes that so much is free, ``hardware``
        another device. ``compare`` costs alternatives such as ``{"num_kv_heads": 2}``; ``measure`` also runs both near
        the size where one becomes faster. ``session`` prices a decode session too, such as ``{"sequences": 4, "policy":
        {"name": "full"}, "pasts": [1024]}``.
        """
        return self.send(sized(operations.complexity, locals()))

    def circuits(
        self, name: str, *, heads: Sequence[int] | None = None, parts: Sequence[CircuitPart] = ("qk", "ov", "spectra"),
        top: int | None = None, vectors: bool = False, with_: str | None = None, with_version: str | None = None,
        version: str | None = None, **options: Unpack[CallOptions],
    ) -> CircuitsReply:  # fmt: skip
        """Return the QK and OV circuits of a module's heads, and the spectra of its parameters, in float64.

        ``heads``, by default all. ``parts``: qk, ov, spectra. ``top`` limits the singular values of each matrix;
        ``vectors`` adds the singular vectors of the circuits ``[H, k, width]``. ``with_`` names a later module:
        composition scores ``[H, L]`` of this module's heads with its heads are added. ``with_version`` pins it.
        """
        return self.send(call(operations.circuits, locals()))

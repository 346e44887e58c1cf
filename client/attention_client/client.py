"""``Client``: every call of the service as a blocking method.

A method hands its arguments, ``locals()``, to ``calls``, which builds the call; ``send`` sends it. ``AsyncClient`` has
the same methods, and a test compares the two.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, cast

import httpx

from attention_client import replies
from attention_client.arguments import (
    AlternativeLike,
    ConfigLike,
    DropoutLike,
    EditLike,
    PictureType,
    ProjectionsLike,
    SelectLike,
    ShapeLike,
    SpecLike,
    SweepLike,
    TensorMap,
)
from attention_client.array_likes import TensorLike
from attention_client.calls import Call, MediaType, Message, ReplyT, call, drawn, sized
from attention_client.connection_settings import LIMITS, Policy, all_headers, prefix_of, server_url
from attention_client.resources.recording_calls import Recordings
from attention_client.resources.server_calls import Server
from attention_client.retry import Attempts
from attention_contract import operations
from attention_contract.errors import AttentionError
from attention_contract.schemas.accuracy import AccuracyReply
from attention_contract.schemas.answers import Picture
from attention_contract.schemas.attention import ForwardReply, KernelName, Tap
from attention_contract.schemas.complexity import ComplexityReply
from attention_contract.schemas.gradients import GradientsReply
from attention_contract.schemas.hardware import HardwareList
from attention_contract.schemas.hopfield import HopfieldReply
from attention_contract.schemas.modules import ModuleInfo, ModuleList, Parameter, ParameterList
from attention_contract.schemas.server import Health, ServerInfo, VariantList
from attention_contract.schemas.weights import WeightsReply


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
    every request. ``transport`` is one of httpx's: a Unix socket, a test's mock, other TLS settings. ``http`` is an
    httpx client of the caller's, with its own authentication, hooks, cookies, timeouts, limits, proxies; it stays open.

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
        transport: httpx.BaseTransport | None = None,
        http: httpx.Client | None = None,
    ) -> None:
        self._policy = Policy(timeout, retries, media_type)
        self._owns_http = http is None
        self._prefix = "" if http is None else prefix_of(http, base_url, headers=headers, transport=transport)
        self._http = http or httpx.Client(
            base_url=server_url(base_url),
            headers=all_headers(headers),
            limits=LIMITS,
            timeout=None,  # noqa: S113 - each attempt gets the time until the deadline
            transport=transport,
        )
        self.settings: dict[str, Any] | None = None
        """The arguments for another client like this one, to be made in another process; None with ``transport`` or
        ``http``, which belong to this one."""
        if transport is None and http is None:
            self.settings = {"base_url": str(self._http.base_url), "timeout": timeout, "retries": retries}
            self.settings |= {"media_type": media_type, "headers": dict(headers or {})}
        self.recordings = Recordings(self)
        self.server = Server(self)

    def send(self, call: Call[ReplyT]) -> ReplyT:
        """Send a call that ``attention_client.calls`` built, and return its reply."""
        attempts = Attempts(call.operation, self._policy.timeout, self._policy.retries)
        message = call.encode(self._policy.media_type)
        while True:
            try:
                return self._attempt(call, message, attempts)
            except AttentionError as fault:
                seconds = attempts.wait_after(fault)
            time.sleep(seconds)

    def _attempt(self, call: Call[ReplyT], message: Message, attempts: Attempts) -> ReplyT:
        response, content = None, bytearray()
        chunks = message.chunks
        request = self._http.build_request(
            message.method,
            self._prefix + message.url,
            params=message.params or None,
            headers=message.headers,
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
        return replies.read(call.operation, response, content)

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

    # ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────

    def server_info(self) -> ServerInfo:
        """Return version, device, dtypes, limits and memory of the server."""
        return self.send(call(operations.server_info, {}))

    def list_variants(self) -> VariantList:
        """List every registered score, mask, position, normalizer, method and kernel."""
        return self.send(call(operations.list_variants, {}))

    def list_hardware(self) -> HardwareList:
        """List the devices that ``hardware`` may name in a question about costs, as their makers describe them."""
        return self.send(call(operations.list_hardware, {}))

    def accuracy(self) -> AccuracyReply:
        """Return how far predicted times were from measured ones, by kernel and purpose."""
        return self.send(call(operations.accuracy, {}))

    def health_live(self) -> Health:
        """Return if the process answers. Never repeated."""
        return self.send(call(operations.health_live, {}))

    def health_ready(self) -> Health:
        """Return if every module is resident and work is taken; raise Loading or Draining if not. Never repeated."""
        return self.send(call(operations.health_ready, {}))

    # ── modules ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def list_modules(self) -> ModuleList:
        """List every resident module."""
        return self.send(call(operations.list_modules, {}))

    def create_module(
        self, name: str, config: ConfigLike, *, seed: int | None = None, parameters: TensorMap | None = None,
        durable: bool = True,
    ) -> ModuleInfo:  # fmt: skip
        """Make a module from a seed (0 by default) or from all of its parameters, by name.

        ``durable=False`` keeps it in the server's memory alone, until the server stops: a change of its parameters then
        writes nothing to a disk. Raises ModuleExists if a different module has the name.
        """
        return self.send(call(operations.create_module, locals()))

    def import_module(
        self, checkpoint: str, *, layer: int = 0, name: str | None = None, part: Literal["self", "cross"] = "self",
        stack: Literal["encoder", "decoder"] | None = None, num_heads: int | None = None,
        durable: bool = True,
    ) -> ModuleInfo:  # fmt: skip
        """Make a module from one attention layer of a checkpoint in the server's model repository.

        ``layer`` counts from 0. ``name`` is by default folder.layer. ``stack`` is needed if a checkpoint has both,
        ``num_heads`` if it does not tell.
        """
        return self.send(call(operations.import_module, locals()))

    def get_module(self, name: str) -> ModuleInfo:
        """Return config, version, device and bytes of a module."""
        return self.send(call(operations.get_module, locals()))

    def delete_module(self, name: str, version: str | None = None) -> None:
        """Remove a module; with a version, only if it is still at that version."""
        return self.send(call(operations.delete_module, locals()))

    def list_parameters(self, name: str) -> ParameterList:
        """List names, shapes and statistics of a module's parameters."""
        return self.send(call(operations.list_parameters, locals()))

    def get_parameter(
        self, name: str, parameter: str, *, head: int | None = None, slice: str | None = None,  # noqa: A002
        version: str | None = None,
    ) -> Parameter:  # fmt: skip
        """Return one parameter, the part of one head, or a slice of it such as ``"0:4,:8"``."""
        return self.send(call(operations.get_parameter, locals()))

    def replace_parameters(self, name: str, parameters: TensorMap, *, version: str | None = None) -> ModuleInfo:
        """Replace all parameters of a module, or none; with a version, only if it is still at that version."""
        return self.send(call(operations.replace_parameters, locals()))

    # ── forward, weights, gradients ──────────────────────────────────────────────────────────────────────────────────

    def forward(
        self, name: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        return_: Sequence[Tap] = ("output",), select: SelectLike | None = None, average_heads: bool = False,
        edits: Sequence[EditLike] = (), dropout: DropoutLike | None = None, return_state: bool = False,
        report_error: bool = False, kernel: KernelName | None = None, parameters: TensorMap | None = None,
        version: str | None = None,
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
        ``dropout {"p": 0.1, "seed": 0}``. ``report_error`` compares a method with exact attention.
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
        average_heads: bool = False, query_mask: TensorLike | None = None, kernel: KernelName | None = None,
        parameters: TensorMap | None = None, version: str | None = None,
    ) -> WeightsReply:  # fmt: skip
        """Return the weights of each head ``[B, H, Lq, Lk]``, their statistics, and the ``top_k`` keys of each query.

        The statistics are ``[B, H]`` each: entropy in nats, distance in tokens, shares of 1. ``top_k`` is at most
        1,024. ``return_weights=False`` leaves the weights out. ``query_mask [B, Lq]``, True for a query that the
        statistics count. The weights are those after the ``edits``. The other arguments are those of ``forward``.
        """
        return self.send(call(operations.weights, locals()))

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
        version: str | None = None,
    ) -> GradientsReply:  # fmt: skip
        """Return exact gradients ∂L/∂name for each name of ``wrt``: inputs, taps, parameters, or ``"parameters"``.

        ``upstream`` is ∂L/∂output, of the output's shape; by default ones. ``tap_upstream`` is ∂L/∂tap of taps that L
        depends on too. ``check`` compares with central differences in float64. ``directions``, by names of ``wrt`` and
        of their shapes, adds Hessian-vector products.
        The other arguments are those of ``forward``.
        """
        return self.send(call(operations.gradients, locals()))

    # ── raw attention ────────────────────────────────────────────────────────────────────────────────────────────────

    def raw_forward(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        spec: SpecLike | None = None, parameters: TensorMap | None = None, num_heads: int | None = None,
        num_kv_heads: int | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        return_: Sequence[Tap] = ("output",), select: SelectLike | None = None, average_heads: bool = False,
        edits: Sequence[EditLike] = (), dropout: DropoutLike | None = None, return_state: bool = False,
        report_error: bool = False, kernel: KernelName | None = None, version: str | None = None,
    ) -> ForwardReply:  # fmt: skip
        """Compute attention over raw q, k and v, as the ``spec`` says: scaled dot product by default.

        ``query [B, H, Lq, D]``, ``key [B, Hkv, Lk − P, D]``, ``value [B, Hkv, Lk − P, Dv]``; or ``[B, L, H·D]`` with
        ``num_heads`` (and ``num_kv_heads``, by default the same). The key is by default the query, the value the key.
        ``parameters``: learned tensors of the spec by name, as ``score.weight``.
        The other arguments are those of ``forward``.
        """
        return self.send(call(operations.raw_forward, locals()))

    attend = raw_forward

    def raw_weights(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        spec: SpecLike | None = None, parameters: TensorMap | None = None, num_heads: int | None = None,
        num_kv_heads: int | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        edits: Sequence[EditLike] = (), top_k: int = 0, select: SelectLike | None = None, return_weights: bool = True,
        average_heads: bool = False, query_mask: TensorLike | None = None, kernel: KernelName | None = None,
        version: str | None = None,
    ) -> WeightsReply:  # fmt: skip
        """Return the weights of a raw attention. Inputs as in ``raw_forward``, the rest as in ``weights``."""
        return self.send(call(operations.raw_weights, locals()))

    def raw_gradients(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        spec: SpecLike | None = None, parameters: TensorMap | None = None, num_heads: int | None = None,
        num_kv_heads: int | None = None,
        wrt: Sequence[str] = ("query",), upstream: TensorLike | None = None, tap_upstream: TensorMap | None = None,
        check: bool = False, directions: TensorMap | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        offsets: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        return_: Sequence[Tap] = ("output",), select: SelectLike | None = None, average_heads: bool = False,
        edits: Sequence[EditLike] = (), dropout: DropoutLike | None = None, return_state: bool = False,
        report_error: bool = False, kernel: KernelName | None = None, version: str | None = None,
    ) -> GradientsReply:  # fmt: skip
        """Return exact gradients of a raw attention. Inputs as in ``raw_forward``, the rest as in ``gradients``."""
        return self.send(call(operations.raw_gradients, locals()))

    # ── cost ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def complexity(
        self, name: str, shape: ShapeLike, sweep: SweepLike | None = None, *, return_: Sequence[Tap] = ("output",),
        kernel: KernelName | None = None, memory_bytes: int | None = None, hardware: str | None = None,
        compare: Sequence[AlternativeLike] = (), measure: bool = False, version: str | None = None,
    ) -> ComplexityReply:  # fmt: skip
        """Return the cost of a module at a shape or over a sweep: FLOPs, bytes, milliseconds, and what fits.

        ``shape {"batch": 1, "queries": 512, "keys": None, "past": 0}``, or a number of queries; ``sweep {"dimension":
        "length", "values": […]}``, or a list of lengths. ``memory_bytes`` supposes that so much is free, ``hardware``
        another device. ``compare`` costs alternatives such as ``{"num_kv_heads": 2}``; ``measure`` also runs both near
        the size where one becomes faster.
        """
        return self.send(sized(operations.complexity, locals()))

    def complexity_picture(
        self, name: str, shape: ShapeLike, sweep: SweepLike | None = None, *, media_type: PictureType = "image/svg+xml",
        return_: Sequence[Tap] = ("output",), kernel: KernelName | None = None, memory_bytes: int | None = None,
        hardware: str | None = None, compare: Sequence[AlternativeLike] = (), measure: bool = False,
        version: str | None = None,
    ) -> Picture:  # fmt: skip
        """Draw the costs that ``complexity`` returns: time and peak memory along the sweep, or up to the shape.

        Raises NotAcceptable if the server cannot draw.
        """
        return self.send(drawn(operations.complexity, locals()))

    def raw_complexity(
        self, shape: ShapeLike, sweep: SweepLike | None = None, *, num_heads: int, head_dim: int,
        num_kv_heads: int | None = None, value_dim: int | None = None, key_dim: int | None = None,
        dtype: str = "float32", spec: SpecLike | None = None, return_: Sequence[Tap] = ("output",),
        kernel: KernelName | None = None,
        memory_bytes: int | None = None, hardware: str | None = None, compare: Sequence[AlternativeLike] = (),
        measure: bool = False, version: str | None = None,
    ) -> ComplexityReply:  # fmt: skip
        """Return the cost of a raw attention, without projections. The other arguments are those of ``complexity``."""
        return self.send(sized(operations.raw_complexity, locals()))

    def raw_complexity_picture(
        self, shape: ShapeLike, sweep: SweepLike | None = None, *, num_heads: int, head_dim: int,
        media_type: PictureType = "image/svg+xml", num_kv_heads: int | None = None, value_dim: int | None = None,
        key_dim: int | None = None, dtype: str = "float32", spec: SpecLike | None = None,
        return_: Sequence[Tap] = ("output",),
        kernel: KernelName | None = None, memory_bytes: int | None = None, hardware: str | None = None,
        compare: Sequence[AlternativeLike] = (), measure: bool = False, version: str | None = None,
    ) -> Picture:  # fmt: skip
        """Draw the costs that ``raw_complexity`` returns, as ``complexity_picture`` draws them."""
        return self.send(drawn(operations.raw_complexity, locals()))

    # ── Hopfield ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def hopfield_retrieve(
        self, stored: TensorLike, states: TensorLike, *, beta: TensorLike | None = None, steps: int | None = None,
        eps: float | None = None, max_steps: int | None = None, stored_mask: TensorLike | None = None,
        projections: ProjectionsLike | None = None, num_heads: int | None = None, return_association: bool = False,
    ) -> HopfieldReply:  # fmt: skip
        """Let states fall to stored patterns: ``steps`` updates, or until an update is smaller than ``eps``.

        ``stored [B, H, N, D]``, ``states [B, H, S, D]``; or ``[B, L, H·D]`` with ``num_heads``. ``beta``, one number
        or ``[H]``, is the inverse temperature; by default 1/√D. ``max_steps`` goes with ``eps``; by default 100.
        ``stored_mask [B, N]``, True for a real pattern. ``projections``: state, stored and output matrices.
        """
        return self.send(call(operations.hopfield_retrieve, locals()))

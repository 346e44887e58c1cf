"""Decode sessions: pasts that stay on the server."""

import ssl
from collections.abc import Coroutine, Generator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Literal, Unpack

from attention_client.arguments import (
    DropoutLike,
    EditLike,
    PolicyLike,
    ReadoutLike,
    SelectLike,
    SourceLike,
    StatisticOptionsLike,
    StepLike,
    SweptEditLike,
    TensorMap,
)
from attention_client.array_likes import TensorLike
from attention_client.calls import Call, CallOptions, call
from attention_client.decoding.live_session import AsyncSession, Session, run_flow, run_flow_awaited
from attention_client.decoding.session_flow import listed, opened
from attention_client.decoding.step_stream import AsyncStepStream, StepStream
from attention_client.resources.base import AsyncResource, Resource
from attention_contract import operations
from attention_contract.schemas.attention import KernelName, Tap
from attention_contract.schemas.attribution import AttributionMethod, AttributionReply
from attention_contract.schemas.effects import EffectsReply
from attention_contract.schemas.gradients import GradientsReply
from attention_contract.schemas.sessions import (
    SessionCache,
    SessionInfo,
    SessionList,
    StepReply,
    StepRequest,
    StepsReply,
)
from attention_contract.schemas.weights import StatisticName, WeightsReply
from attention_contract.wire import SAFETENSORS

KEEP_BYTES: Final = 2**28
"""Bytes of inputs that a session keeps for its replay, by default."""


class Sessions(Resource):
    """Calls about decode sessions. ``open`` returns a session with replay; the others are one request each."""

    def list(
        self, *, limit: int | None = None, cursor: str | None = None, **options: Unpack[CallOptions]
    ) -> SessionList:
        """List every session and the memory of all. ``parent`` makes the list a tree.

        With ``limit`` or ``cursor``, one page: at most so many sessions, from the ``next`` of the page before on.
        """
        return run_flow(listed(call(operations.list_sessions, locals())), self.send)

    def create(
        self, name: str, *, sequences: int | None = None, capacity: int | None = None, ttl_s: float | None = None,
        policy: PolicyLike | None = None, pinned: bool = False, share: bool = False, version: str | None = None,
        from_: SourceLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        **options: Unpack[CallOptions],
    ) -> SessionInfo:  # fmt: skip
        """Open a session of a module and return its id and facts; see ``open``. It is not repeated or replayed."""
        return self.send(call(operations.open_session, locals()))

    def get(self, id: str, **options: Unpack[CallOptions]) -> SessionInfo:  # noqa: A002
        """Return module, length, memory and expiry of a session. Raises SessionNotFound or SessionGone."""
        return self.send(call(operations.get_session, locals()))

    def delete(self, id: str, **options: Unpack[CallOptions]) -> None:  # noqa: A002
        """End a session and free its pages."""
        return self.send(call(operations.delete_session, locals()))

    def step(
        self, id: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,  # noqa: A002
        at: int | None = None, step: str | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        return_: Sequence[Tap] = ("output",), select: SelectLike | None = None, average_heads: bool = False,
        edits: Sequence[EditLike] = (), dropout: DropoutLike | None = None, return_state: bool = False,
        report_error: bool = False, compare: Literal["unedited"] | None = None,
        kernel: KernelName | None = None, parameters: TensorMap | None = None,
        version: str | None = None, **options: Unpack[CallOptions],
    ) -> StepReply:  # fmt: skip
        """Compute attention of new tokens over all tokens of a session, and append them.

        ``query [B, Lq, d_model]``. ``at`` is the length that the session should have: LengthMismatch otherwise.
        ``step`` names the step: the server answers the last step again if it had this name, and appends nothing, so
        that a caller may repeat it. The other arguments are those of ``Client.forward``.
        """
        return self.send(_if_named(call(operations.step_session, locals())))

    def step_many(self, steps: Sequence[StepLike], **options: Unpack[CallOptions]) -> StepsReply:
        """Step many sessions at once: ``[{"session": id, "query": tokens}, …]``, at most 1,024.

        Each result is the reply of that step, or its problem document. All travel in one request and run together.
        """
        return self.send(call(operations.step_sessions, locals()))

    def fork(
        self, id: str, length: int | None = None, *, capacity: int | None = None, ttl_s: float | None = None,  # noqa: A002
        pinned: bool = False, **options: Unpack[CallOptions],
    ) -> SessionInfo:  # fmt: skip
        """Copy a session, or its first ``length`` tokens. Both share the memory of all full pages."""
        return self.send(call(operations.fork_session, locals()))

    def truncate(
        self, id: str, length: int, *, at: int | None = None, **options: Unpack[CallOptions],  # noqa: A002
    ) -> SessionInfo:  # fmt: skip
        """Forget all but the first ``length`` tokens of a session."""
        return self.send(call(operations.truncate_session, locals()))

    def reorder(
        self, id: str, rows: Sequence[int], *, at: int | None = None, **options: Unpack[CallOptions],  # noqa: A002
    ) -> SessionInfo:  # fmt: skip
        """Let sequence b continue what sequence ``rows[b]`` was; the number of rows is the new number of sequences."""
        return self.send(call(operations.reorder_session, locals()))

    def weights(
        self, id: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,  # noqa: A002
        at: int | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        edits: Sequence[EditLike] = (), top_k: int = 0, select: SelectLike | None = None, return_weights: bool = True,
        pool: int | None = None, average_heads: bool = False, query_mask: TensorLike | None = None,
        statistics: Sequence[StatisticName] | None = None, statistic_options: StatisticOptionsLike | None = None,
        compare: Literal["unedited"] | None = None, labels: Sequence[str] | None = None,
        query_labels: Sequence[str] | None = None, kernel: KernelName | None = None,
        parameters: TensorMap | None = None, version: str | None = None, **options: Unpack[CallOptions],
    ) -> WeightsReply:  # fmt: skip
        """Return the weights of new tokens over all tokens of a session; see ``Client.weights``. Appends nothing."""
        return self.send(call(operations.session_weights, locals()))

    def attribution(
        self, id: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,  # noqa: A002
        at: int | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        methods: Sequence[AttributionMethod] = ("gradient_attention",), upstream: TensorLike | None = None,
        readout: ReadoutLike | None = None, steps: int = 32, edits: Sequence[EditLike] = (),
        select: SelectLike | None = None, compare: Literal["unedited"] | None = None,
        labels: Sequence[str] | None = None, query_labels: Sequence[str] | None = None,
        kernel: KernelName | None = None, parameters: TensorMap | None = None, version: str | None = None,
        **options: Unpack[CallOptions],
    ) -> AttributionReply:  # fmt: skip
        """Attribute to the weights of new tokens over all tokens of a session; see ``Client.attribution``."""
        return self.send(call(operations.session_attribution, locals()))

    def effects(
        self, id: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,  # noqa: A002
        sweep: SweptEditLike, at: int | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        edits: Sequence[EditLike] = (), queries: Sequence[int] | None = None, direction: TensorLike | None = None,
        return_differences: bool = False, kernel: KernelName | None = None, parameters: TensorMap | None = None,
        version: str | None = None, **options: Unpack[CallOptions],
    ) -> EffectsReply:  # fmt: skip
        """Return the effects of a sweep of edits on new tokens over all tokens of a session; see ``Client.effects``."""
        return self.send(call(operations.session_effects, locals()))

    def gradients(
        self, id: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,  # noqa: A002
        at: int | None = None, wrt: Sequence[str] = ("query",), upstream: TensorLike | None = None,
        tap_upstream: TensorMap | None = None, check: bool = False, directions: TensorMap | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        return_: Sequence[Tap] = ("output",), select: SelectLike | None = None, average_heads: bool = False,
        edits: Sequence[EditLike] = (), dropout: DropoutLike | None = None, return_state: bool = False,
        report_error: bool = False, kernel: KernelName | None = None, parameters: TensorMap | None = None,
        version: str | None = None, **options: Unpack[CallOptions],
    ) -> GradientsReply:  # fmt: skip
        """Return gradients of new tokens over all tokens of a session; see ``Client.gradients``. Appends nothing.

        ``past_key`` and ``past_value`` in ``wrt`` are the cached keys and values.
        """
        return self.send(call(operations.session_gradients, locals()))

    def cache(self, id: str, **options: Unpack[CallOptions]) -> SessionCache:  # noqa: A002
        """Return the keys and values of a session: ``[B, Hkv, P, D]`` and ``[B, Hkv, P, Dv]``."""
        return self.send(_with_dtypes(call(operations.get_session_cache, locals())))

    def replace_cache(
        self, id: str, past_key: TensorLike, past_value: TensorLike, *, version: str | None = None,  # noqa: A002
        **options: Unpack[CallOptions],
    ) -> SessionInfo:  # fmt: skip
        """Replace the whole past of a session by these keys and values."""
        return self.send(call(operations.put_session_cache, locals()))

    def open(
        self, name: str, *, sequences: int | None = None, capacity: int | None = None, ttl_s: float | None = None,
        policy: PolicyLike | None = None, pinned: bool = False, share: bool = False, version: str | None = None,
        from_: SourceLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        keep_bytes: int = KEEP_BYTES, spill: bool = False, **options: Unpack[CallOptions],
    ) -> Session:  # fmt: skip
        """Open a session of a module: ``with client.sessions.open("demo") as session: …``.

        ``capacity`` reserves memory for this many tokens; without it, a step may be refused while others take the
        memory. The session expires after ``ttl_s`` seconds without a request, and is not evicted for another if
        ``pinned``. ``policy`` chooses which tokens stay: ``{"name": "window_sinks", "window": 1024}``. ``share``
        holds equal prefixes of sessions once. It begins empty, with ``past_key [B, Hkv, P, D]`` and ``past_value``, or
        with another session's past: ``from_={"session": id, "length": 10}``.
        The session keeps up to ``keep_bytes`` of its inputs, to compute its past again after the server has lost it;
        ``spill`` writes what exceeds them to a temporary file.
        """
        arguments = locals()
        kept = {name: arguments.pop(name) for name in ("keep_bytes", "spill")}
        return Session.begin(opened(call(operations.open_session, arguments), **kept), self.send, self.stream)

    def stream(self, ssl: ssl.SSLContext | None = None) -> StepStream:
        """Return a connection for steps of any sessions, with the lowest latency, for a ``with`` block."""
        return StepStream(self._settings(), ssl)


class AsyncSessions(AsyncResource):
    """The same calls as ``Sessions``, awaited."""

    async def list(
        self, *, limit: int | None = None, cursor: str | None = None, **options: Unpack[CallOptions]
    ) -> SessionList:
        """List every session and the memory of all. ``parent`` makes the list a tree.

        With ``limit`` or ``cursor``, one page: at most so many sessions, from the ``next`` of the page before on.
        """
        return await run_flow_awaited(listed(call(operations.list_sessions, locals())), self.send)

    async def create(
        self, name: str, *, sequences: int | None = None, capacity: int | None = None, ttl_s: float | None = None,
        policy: PolicyLike | None = None, pinned: bool = False, share: bool = False, version: str | None = None,
        from_: SourceLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        **options: Unpack[CallOptions],
    ) -> SessionInfo:  # fmt: skip
        """Open a session of a module and return its id and facts; see ``open``. It is not repeated or replayed."""
        return await self.send(call(operations.open_session, locals()))

    async def get(self, id: str, **options: Unpack[CallOptions]) -> SessionInfo:  # noqa: A002
        """Return module, length, memory and expiry of a session. Raises SessionNotFound or SessionGone."""
        return await self.send(call(operations.get_session, locals()))

    async def delete(self, id: str, **options: Unpack[CallOptions]) -> None:  # noqa: A002
        """End a session and free its pages."""
        return await self.send(call(operations.delete_session, locals()))

    async def step(
        self, id: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,  # noqa: A002
        at: int | None = None, step: str | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        return_: Sequence[Tap] = ("output",), select: SelectLike | None = None, average_heads: bool = False,
        edits: Sequence[EditLike] = (), dropout: DropoutLike | None = None, return_state: bool = False,
        report_error: bool = False, compare: Literal["unedited"] | None = None,
        kernel: KernelName | None = None, parameters: TensorMap | None = None,
        version: str | None = None, **options: Unpack[CallOptions],
    ) -> StepReply:  # fmt: skip
        """Compute attention of new tokens over all tokens of a session, and append them.

        ``query [B, Lq, d_model]``. ``at`` is the length that the session should have: LengthMismatch otherwise.
        ``step`` names the step: the server answers the last step again if it had this name, and appends nothing, so
        that a caller may repeat it. The other arguments are those of ``Client.forward``.
        """
        return await self.send(_if_named(call(operations.step_session, locals())))

    async def step_many(self, steps: Sequence[StepLike], **options: Unpack[CallOptions]) -> StepsReply:
        """Step many sessions at once: ``[{"session": id, "query": tokens}, …]``, at most 1,024.

        Each result is the reply of that step, or its problem document. All travel in one request and run together.
        """
        return await self.send(call(operations.step_sessions, locals()))

    async def fork(
        self, id: str, length: int | None = None, *, capacity: int | None = None, ttl_s: float | None = None,  # noqa: A002
        pinned: bool = False, **options: Unpack[CallOptions],
    ) -> SessionInfo:  # fmt: skip
        """Copy a session, or its first ``length`` tokens. Both share the memory of all full pages."""
        return await self.send(call(operations.fork_session, locals()))

    async def truncate(
        self, id: str, length: int, *, at: int | None = None, **options: Unpack[CallOptions],  # noqa: A002
    ) -> SessionInfo:  # fmt: skip
        """Forget all but the first ``length`` tokens of a session."""
        return await self.send(call(operations.truncate_session, locals()))

    async def reorder(
        self, id: str, rows: Sequence[int], *, at: int | None = None, **options: Unpack[CallOptions],  # noqa: A002
    ) -> SessionInfo:  # fmt: skip
        """Let sequence b continue what sequence ``rows[b]`` was; the number of rows is the new number of sequences."""
        return await self.send(call(operations.reorder_session, locals()))

    async def weights(
        self, id: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,  # noqa: A002
        at: int | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        edits: Sequence[EditLike] = (), top_k: int = 0, select: SelectLike | None = None, return_weights: bool = True,
        pool: int | None = None, average_heads: bool = False, query_mask: TensorLike | None = None,
        statistics: Sequence[StatisticName] | None = None, statistic_options: StatisticOptionsLike | None = None,
        compare: Literal["unedited"] | None = None, labels: Sequence[str] | None = None,
        query_labels: Sequence[str] | None = None, kernel: KernelName | None = None,
        parameters: TensorMap | None = None, version: str | None = None, **options: Unpack[CallOptions],
    ) -> WeightsReply:  # fmt: skip
        """Return the weights of new tokens over all tokens of a session; see ``Client.weights``. Appends nothing."""
        return await self.send(call(operations.session_weights, locals()))

    async def attribution(
        self, id: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,  # noqa: A002
        at: int | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        methods: Sequence[AttributionMethod] = ("gradient_attention",), upstream: TensorLike | None = None,
        readout: ReadoutLike | None = None, steps: int = 32, edits: Sequence[EditLike] = (),
        select: SelectLike | None = None, compare: Literal["unedited"] | None = None,
        labels: Sequence[str] | None = None, query_labels: Sequence[str] | None = None,
        kernel: KernelName | None = None, parameters: TensorMap | None = None, version: str | None = None,
        **options: Unpack[CallOptions],
    ) -> AttributionReply:  # fmt: skip
        """Attribute to the weights of new tokens over all tokens of a session; see ``Client.attribution``."""
        return await self.send(call(operations.session_attribution, locals()))

    async def effects(
        self, id: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,  # noqa: A002
        sweep: SweptEditLike, at: int | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        edits: Sequence[EditLike] = (), queries: Sequence[int] | None = None, direction: TensorLike | None = None,
        return_differences: bool = False, kernel: KernelName | None = None, parameters: TensorMap | None = None,
        version: str | None = None, **options: Unpack[CallOptions],
    ) -> EffectsReply:  # fmt: skip
        """Return the effects of a sweep of edits on new tokens over all tokens of a session; see ``Client.effects``."""
        return await self.send(call(operations.session_effects, locals()))

    async def gradients(
        self, id: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,  # noqa: A002
        at: int | None = None, wrt: Sequence[str] = ("query",), upstream: TensorLike | None = None,
        tap_upstream: TensorMap | None = None, check: bool = False, directions: TensorMap | None = None,
        mask: TensorLike | None = None, key_mask: TensorLike | None = None, key_lengths: TensorLike | None = None,
        global_mask: TensorLike | None = None, positions: TensorLike | None = None, gate: TensorLike | None = None,
        beta: TensorLike | None = None,
        initial_state: TensorLike | None = None, initial_normalizer: TensorLike | None = None,
        return_: Sequence[Tap] = ("output",), select: SelectLike | None = None, average_heads: bool = False,
        edits: Sequence[EditLike] = (), dropout: DropoutLike | None = None, return_state: bool = False,
        report_error: bool = False, kernel: KernelName | None = None, parameters: TensorMap | None = None,
        version: str | None = None, **options: Unpack[CallOptions],
    ) -> GradientsReply:  # fmt: skip
        """Return gradients of new tokens over all tokens of a session; see ``Client.gradients``. Appends nothing.

        ``past_key`` and ``past_value`` in ``wrt`` are the cached keys and values.
        """
        return await self.send(call(operations.session_gradients, locals()))

    async def cache(self, id: str, **options: Unpack[CallOptions]) -> SessionCache:  # noqa: A002
        """Return the keys and values of a session: ``[B, Hkv, P, D]`` and ``[B, Hkv, P, Dv]``."""
        return await self.send(_with_dtypes(call(operations.get_session_cache, locals())))

    async def replace_cache(
        self, id: str, past_key: TensorLike, past_value: TensorLike, *, version: str | None = None,  # noqa: A002
        **options: Unpack[CallOptions],
    ) -> SessionInfo:  # fmt: skip
        """Replace the whole past of a session by these keys and values."""
        return await self.send(call(operations.put_session_cache, locals()))

    def open(
        self, name: str, *, sequences: int | None = None, capacity: int | None = None, ttl_s: float | None = None,
        policy: PolicyLike | None = None, pinned: bool = False, share: bool = False, version: str | None = None,
        from_: SourceLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        keep_bytes: int = KEEP_BYTES, spill: bool = False, **options: Unpack[CallOptions],
    ) -> "Opening":  # fmt: skip
        """Open a session of a module: ``async with client.sessions.open("demo") as session: …``.

        ``capacity`` reserves memory for this many tokens; without it, a step may be refused while others take the
        memory. The session expires after ``ttl_s`` seconds without a request, and is not evicted for another if
        ``pinned``. ``policy`` chooses which tokens stay: ``{"name": "window_sinks", "window": 1024}``. ``share``
        holds equal prefixes of sessions once. It begins empty, with ``past_key [B, Hkv, P, D]`` and ``past_value``, or
        with another session's past: ``from_={"session": id, "length": 10}``.
        The session keeps up to ``keep_bytes`` of its inputs, to compute its past again after the server has lost it;
        ``spill`` writes what exceeds them to a temporary file.
        """
        arguments = locals()
        kept = {name: arguments.pop(name) for name in ("keep_bytes", "spill")}
        return Opening(
            AsyncSession.begin(opened(call(operations.open_session, arguments), **kept), self.send, self.stream)
        )

    def stream(self, ssl: ssl.SSLContext | None = None) -> AsyncStepStream:
        """Return a connection for steps of any sessions, with the lowest latency, for an ``async with`` block."""
        return AsyncStepStream(self._settings(), ssl)


class Opening(AbstractAsyncContextManager[AsyncSession]):
    """A session that is being opened: await it, or use it in an ``async with`` block, at whose end it closes."""

    def __init__(self, opening: Coroutine[Any, Any, AsyncSession]) -> None:
        self._opening = opening
        self._session: AsyncSession | None = None

    def __await__(self) -> Generator[Any, Any, AsyncSession]:
        return self._opening.__await__()

    async def __aenter__(self) -> AsyncSession:
        self._session = await self._opening
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.__aexit__(kind, fault, trace)


def _if_named(about: Call[StepReply]) -> Call[StepReply]:
    """The call as one that is safe to repeat, if its step has a name."""
    named = isinstance(about.request, StepRequest) and about.request.step is not None
    return replace(about, operation=replace(about.operation, safe_to_repeat=True)) if named else about


def _with_dtypes(about: Call[SessionCache]) -> Call[SessionCache]:
    """The call whose reply travels as safetensors: lists in JSON do not tell their dtype."""
    return replace(about, headers={**about.headers, "Accept": SAFETENSORS})

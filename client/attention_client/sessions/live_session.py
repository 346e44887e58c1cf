"""``Session`` and ``AsyncSession``: a past on the server that outlives the server's memory of it.

Both run the flows of ``session_flow``.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, Self, Unpack

from attention_client.arguments import (
    AttributionFields,
    EffectsFields,
    ForwardFields,
    GradientsFields,
    SweptEditLike,
    WeightsFields,
)
from attention_client.array_likes import TensorLike
from attention_client.calls.base import Call, CallOptions, call
from attention_client.calls.method import Awaited, Blocking, Calls, Flow, WayT, method, run, run_awaited
from attention_client.errors import ConnectionFailed, DeadlineExceeded
from attention_client.sessions.session_flow import SessionFlow, with_dtypes
from attention_client.streams.step_stream import AsyncStepStream, StepStream
from attention_contract import operations
from attention_contract.errors import AttentionError, BodyTooLarge, Overloaded, Unavailable
from attention_contract.schemas.analyses.attribution import AttributionMethod, AttributionReply
from attention_contract.schemas.analyses.effects import EffectsReply
from attention_contract.schemas.attention import Tap
from attention_contract.schemas.gradients import GradientsReply
from attention_contract.schemas.sessions import SessionCache, SessionInfo, StepReply, StepRequest
from attention_contract.schemas.weights import WeightsReply

Send = Callable[[Call[Any]], Any]
AsyncSend = Callable[[Call[Any]], Awaitable[Any]]
_BY_REQUEST: Final = (ConnectionFailed, BodyTooLarge, Overloaded, Unavailable)
"""Errors of a stream after which a step is sent as a request, which waits and repeats. Its id makes that safe."""


class LiveSession(Calls[WayT]):
    """A session's facts, as its owner knows them without asking, and its calls."""

    def __init__(self, flow: SessionFlow, send: Callable[[Call[Any]], Any], open_stream: Callable[..., Any]) -> None:
        self._flow = flow
        self._send = send
        self._open_stream = open_stream
        self._stream: Any = None

    @property
    def id(self) -> str:
        """The session's id, another one after each replay."""
        return self._flow.id

    @property
    def affinity(self) -> str:
        """The ``x-session-id`` of each of its calls and of its forks."""
        return self._flow.affinity

    @property
    def module(self) -> str:
        """The module's name."""
        return self._flow.module

    @property
    def version(self) -> str:
        """The module's version, which the session keeps."""
        return self._flow.version

    @property
    def length(self) -> int:
        """Number of tokens of each sequence."""
        return self._flow.length

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self._flow.sequences

    @property
    def replays(self) -> int:
        """The number of times that the server lost the session and it was computed again."""
        return self._flow.replays

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.module}: {self.length} tokens>"

    @method
    def step(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        return_: Sequence[Tap] = ("output",), average_heads: bool = False, return_state: bool = False,
        report_error: bool = False, **options: Unpack[ForwardFields],
    ) -> Flow[StepReply]:  # fmt: skip
        """Compute attention of new tokens over all tokens so far, and append them.

        ``query [B, Lq, d_model]``, any number of tokens; the other fields are those of ``Client.forward``. A reply that
        was lost is asked for again: no token is appended twice.
        """
        return self._flow.step(call(operations.step_session, {**locals(), "id": self.id}))

    @method
    def truncate(self, length: int, **options: Unpack[CallOptions]) -> Flow[SessionInfo]:
        """Forget all but the first ``length`` tokens."""
        return self._flow.truncate(call(operations.truncate_session, {**locals(), "id": self.id}))

    @method
    def reorder(self, rows: Sequence[int], **options: Unpack[CallOptions]) -> Flow[SessionInfo]:
        """Let sequence b continue what sequence ``rows[b]`` was; the number of rows is the new number of sequences."""
        return self._flow.reorder(call(operations.reorder_session, {**locals(), "id": self.id}))

    @method
    def weights(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        top_k: int = 0, return_weights: bool = True, average_heads: bool = False, **options: Unpack[WeightsFields],
    ) -> Flow[WeightsReply]:  # fmt: skip
        """Return the weights of new tokens over all tokens so far. Nothing is appended. See ``Client.weights``."""
        return self._flow.ask(call(operations.session_weights, {**locals(), "id": self.id}))

    @method
    def attribution(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        methods: Sequence[AttributionMethod] = ("gradient_attention",), steps: int = 32,
        **options: Unpack[AttributionFields],
    ) -> Flow[AttributionReply]:  # fmt: skip
        """Attribute to the weights of new tokens over all tokens so far. See ``Client.attribution``."""
        return self._flow.ask(call(operations.session_attribution, {**locals(), "id": self.id}))

    @method
    def effects(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        sweep: SweptEditLike, return_differences: bool = False, **options: Unpack[EffectsFields],
    ) -> Flow[EffectsReply]:  # fmt: skip
        """Return the effects of a sweep of edits on new tokens over all tokens so far. See ``Client.effects``."""
        return self._flow.ask(call(operations.session_effects, {**locals(), "id": self.id}))

    @method
    def gradients(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        wrt: Sequence[str] = ("query",), check: bool = False, return_: Sequence[Tap] = ("output",),
        average_heads: bool = False, return_state: bool = False, report_error: bool = False,
        **options: Unpack[GradientsFields],
    ) -> Flow[GradientsReply]:  # fmt: skip
        """Return gradients of new tokens over all tokens so far. Nothing is appended. See ``Client.gradients``.

        ``past_key`` and ``past_value`` in ``wrt`` are the cached keys and values.
        """
        return self._flow.ask(call(operations.session_gradients, {**locals(), "id": self.id}))

    @method
    def info(self, **options: Unpack[CallOptions]) -> Flow[SessionInfo]:
        """Return length, memory and expiry as the server knows them."""
        return self._flow.ask(call(operations.get_session, {**locals(), "id": self.id}))

    @method
    def cache(self, **options: Unpack[CallOptions]) -> Flow[SessionCache]:
        """Return the keys and values: ``past_key [B, Hkv, P, D]`` and ``past_value [B, Hkv, P, Dv]``."""
        return self._flow.ask(with_dtypes(call(operations.get_session_cache, {**locals(), "id": self.id})))

    @method
    def replace_cache(
        self, past_key: TensorLike, past_value: TensorLike, **options: Unpack[CallOptions]
    ) -> Flow[SessionInfo]:
        """Replace the whole past by these keys and values."""
        return self._flow.replace_cache(call(operations.put_session_cache, {**locals(), "id": self.id}))

    @method
    def close(self, **options: Unpack[CallOptions]) -> Flow[None]:
        """End the session and free its memory on the server."""
        return self._flow.close(options)


class Session(LiveSession[Blocking]):
    """A decode session. Use it in one thread at a time; ``close``, or the end of a ``with`` block, ends it.

    It keeps the inputs of its steps. After the server has lost the session (expired, evicted, restarted), it opens
    another one of the same module version, computes the past again in large steps, logs a warning and goes on. Raises
    SessionGone if it cannot: somebody deleted it, the module has changed, or the inputs exceeded ``keep_bytes``.
    """

    @classmethod
    def begin(cls, opening: Flow[SessionFlow], send: Send, open_stream: Callable[..., StepStream]) -> "Session":
        """Run the flow that opens a session."""
        return cls(run(opening, send), send, open_stream)

    def fork(self, length: int | None = None, **options: Unpack[CallOptions]) -> "Session":
        """Return a copy of the session, or of its first ``length`` tokens. The two share the memory of equal pages."""
        return self.begin(self._flow.fork(length, options), self._send, self._open_stream)

    @contextmanager
    def stream(self, stream: StepStream | None = None) -> Iterator[StepStream]:
        """Send the steps within the block as messages of one connection: a new one, or one that sessions share."""
        own = stream is None
        self._stream = stream or self._open_stream(affinity=self.affinity)
        try:
            yield self._stream
        finally:
            if own:
                self._stream.close()
            self._stream = None

    def send(self, call: Call[Any]) -> Any:
        """Send a call: a step on the stream, if there is one that works, else a request."""
        if self._stream is not None and isinstance(call.request, StepRequest):
            try:
                return self._stream.send(call)
            except _BY_REQUEST as fault:
                _check_repeats(fault)
        return self._send(call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, fault: object, trace: object) -> None:
        try:
            self.close()
        except AttentionError:
            if fault is None:
                raise


class AsyncSession(LiveSession[Awaited]):
    """The same as ``Session``, awaited. Use it in one task at a time."""

    _awaits = True

    @classmethod
    async def begin(
        cls, opening: Flow[SessionFlow], send: AsyncSend, open_stream: Callable[..., AsyncStepStream]
    ) -> "AsyncSession":
        """Run the flow that opens a session."""
        return cls(await run_awaited(opening, send), send, open_stream)

    async def fork(self, length: int | None = None, **options: Unpack[CallOptions]) -> "AsyncSession":
        """Return a copy of the session, or of its first ``length`` tokens. The two share the memory of equal pages."""
        return await self.begin(self._flow.fork(length, options), self._send, self._open_stream)

    @asynccontextmanager
    async def stream(self, stream: AsyncStepStream | None = None) -> AsyncIterator[AsyncStepStream]:
        """Send the steps within the block as messages of one connection: a new one, or one that sessions share."""
        own = stream is None
        self._stream = stream or self._open_stream(affinity=self.affinity)
        try:
            yield self._stream
        finally:
            if own:
                await self._stream.close()
            self._stream = None

    async def send(self, call: Call[Any]) -> Any:
        """Send a call: a step on the stream, if there is one that works, else a request."""
        if self._stream is not None and isinstance(call.request, StepRequest):
            try:
                return await self._stream.send(call)
            except _BY_REQUEST as fault:
                _check_repeats(fault)
        return await self._send(call)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, fault: object, trace: object) -> None:
        try:
            await self.close()
        except AttentionError:
            if fault is None:
                raise


def _check_repeats(fault: AttentionError) -> None:
    """Raise an error of a stream after which the caller waits no longer."""
    if isinstance(fault, DeadlineExceeded):
        raise fault

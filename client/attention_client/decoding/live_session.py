"""``Session`` and ``AsyncSession``: a past on the server that outlives the server's memory of it.

Both run the flows of ``session_flow``; a test compares the two.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

from attention_client.arguments import AttributionFields, EffectsFields, GradientsFields, StepFields, WeightsFields
from attention_client.array_likes import TensorLike, plain
from attention_client.calls import Call, CallOptions
from attention_client.decoding.session_flow import Flow, SessionFlow
from attention_client.decoding.step_stream import AsyncStepStream, StepStream
from attention_client.errors import ConnectionFailed, DeadlineExceeded
from attention_contract import operations
from attention_contract.base import WireModel
from attention_contract.errors import AttentionError, BodyTooLarge, Overloaded, Unavailable
from attention_contract.schemas.attribution import AttributionReply
from attention_contract.schemas.effects import EffectsReply
from attention_contract.schemas.gradients import GradientsReply
from attention_contract.schemas.sessions import (
    ReorderSession,
    ReplaceCache,
    SessionAttributionRequest,
    SessionCache,
    SessionEffectsRequest,
    SessionGradientsRequest,
    SessionInfo,
    SessionWeightsRequest,
    StepReply,
    StepRequest,
)
from attention_contract.schemas.weights import WeightsReply
from attention_contract.validation import validate

ResultT = TypeVar("ResultT")
ModelT = TypeVar("ModelT", bound=WireModel)
Send = Callable[[Call[Any]], Any]
AsyncSend = Callable[[Call[Any]], Awaitable[Any]]
_BY_REQUEST: Final = (ConnectionFailed, BodyTooLarge, Overloaded, Unavailable)
"""Errors of a stream after which a step is sent as a request, which waits and repeats. Its id makes that safe."""


class _Known:
    """A session's facts, as its owner knows them without asking."""

    def __init__(self, flow: SessionFlow) -> None:
        self._flow = flow

    @property
    def id(self) -> str:
        """The session's id, another one after each replay."""
        return self._flow.id

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


class Session(_Known):
    """A decode session. Use it in one thread at a time; ``close``, or the end of a ``with`` block, ends it.

    It keeps the inputs of its steps. After the server has lost the session (expired, evicted, restarted), it opens
    another one of the same module version, computes the past again in large steps, logs a warning and goes on. Raises
    SessionGone if it cannot: somebody deleted it, the module has changed, or the inputs exceeded ``keep_bytes``.
    """

    @classmethod
    def begin(cls, opening: Flow[SessionFlow], send: Send, open_stream: Callable[[], StepStream]) -> "Session":
        """Run the flow that opens a session."""
        return cls(run_flow(opening, send), send, open_stream)

    def __init__(self, flow: SessionFlow, send: Send, open_stream: Callable[[], StepStream]) -> None:
        super().__init__(flow)
        self._send = send
        self._open_stream = open_stream
        self._stream: StepStream | None = None

    def step(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None,
        **fields: Unpack[StepFields],
    ) -> StepReply:  # fmt: skip
        """Compute attention of new tokens over all tokens so far, and append them.

        ``query [B, Lq, d_model]``, any number of tokens; the other fields are those of ``Client.forward``. A reply that
        was lost is asked for again: no token is appended twice.
        """
        request, options = _request(StepRequest, query, key, value, fields)
        return self._run(self._flow.step(request, options))

    def fork(self, length: int | None = None, **options: Unpack[CallOptions]) -> "Session":
        """Return a copy of the session, or of its first ``length`` tokens. The two share the memory of equal pages."""
        made = self._run(self._flow.fork(length, options))
        return Session(made, self._send, self._open_stream)

    def truncate(self, length: int, **options: Unpack[CallOptions]) -> SessionInfo:
        """Forget all but the first ``length`` tokens."""
        return self._run(self._flow.truncate(length, options))

    def reorder(self, rows: Sequence[int], **options: Unpack[CallOptions]) -> SessionInfo:
        """Let sequence b continue what sequence ``rows[b]`` was; the number of rows is the new number of sequences."""
        request = validate(ReorderSession, {"rows": plain(rows)})
        return self._run(self._flow.reorder(request, options))

    def weights(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None,
        **fields: Unpack[WeightsFields],
    ) -> WeightsReply:  # fmt: skip
        """Return the weights of new tokens over all tokens so far. Nothing is appended. See ``Client.weights``."""
        request, options = _request(SessionWeightsRequest, query, key, value, fields)
        return self._run(self._flow.ask(operations.session_weights, request, options))

    def attribution(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None,
        **fields: Unpack[AttributionFields],
    ) -> AttributionReply:  # fmt: skip
        """Attribute to the weights of new tokens over all tokens so far. See ``Client.attribution``."""
        request, options = _request(SessionAttributionRequest, query, key, value, fields)
        return self._run(self._flow.ask(operations.session_attribution, request, options))

    def effects(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None,
        **fields: Unpack[EffectsFields],
    ) -> EffectsReply:  # fmt: skip
        """Return the effects of a sweep of edits on new tokens over all tokens so far. See ``Client.effects``."""
        request, options = _request(SessionEffectsRequest, query, key, value, fields)
        return self._run(self._flow.ask(operations.session_effects, request, options))

    def gradients(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None,
        **fields: Unpack[GradientsFields],
    ) -> GradientsReply:  # fmt: skip
        """Return gradients of new tokens over all tokens so far. Nothing is appended. See ``Client.gradients``.

        ``past_key`` and ``past_value`` in ``wrt`` are the cached keys and values.
        """
        request, options = _request(SessionGradientsRequest, query, key, value, fields)
        return self._run(self._flow.ask(operations.session_gradients, request, options))

    def info(self, **options: Unpack[CallOptions]) -> SessionInfo:
        """Return length, memory and expiry as the server knows them."""
        return self._run(self._flow.ask(operations.get_session, None, options))

    def cache(self, **options: Unpack[CallOptions]) -> SessionCache:
        """Return the keys and values: ``past_key [B, Hkv, P, D]`` and ``past_value [B, Hkv, P, Dv]``."""
        return self._run(self._flow.cache(options))

    def replace_cache(
        self, past_key: TensorLike, past_value: TensorLike, **options: Unpack[CallOptions]
    ) -> SessionInfo:
        """Replace the whole past by these keys and values."""
        request = validate(ReplaceCache, {"past_key": plain(past_key), "past_value": plain(past_value)})
        return self._run(self._flow.replace_cache(request, options))

    @contextmanager
    def stream(self, stream: StepStream | None = None) -> Iterator[StepStream]:
        """Send the steps within the block as messages of one connection: a new one, or one that sessions share."""
        own = stream is None
        self._stream = stream or self._open_stream()
        try:
            yield self._stream
        finally:
            if own:
                self._stream.close()
            self._stream = None

    def close(self, **options: Unpack[CallOptions]) -> None:
        """End the session and free its memory on the server."""
        self._run(self._flow.close(options))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except AttentionError:
            if fault is None:
                raise

    def _run(self, flow: Flow[ResultT]) -> ResultT:
        return run_flow(flow, self._answer)

    def _answer(self, call: Call[Any]) -> Any:
        """Send a call: a step on the stream, if there is one that works, else a request."""
        if self._stream is not None and isinstance(call.request, StepRequest):
            try:
                return self._stream.answer(call)
            except _BY_REQUEST as fault:
                _check_repeats(fault)
        return self._send(call)


class AsyncSession(_Known):
    """The same as ``Session``, awaited. Use it in one task at a time."""

    @classmethod
    async def begin(
        cls, opening: Flow[SessionFlow], send: AsyncSend, open_stream: Callable[[], AsyncStepStream]
    ) -> "AsyncSession":
        """Run the flow that opens a session."""
        return cls(await run_flow_awaited(opening, send), send, open_stream)

    def __init__(self, flow: SessionFlow, send: AsyncSend, open_stream: Callable[[], AsyncStepStream]) -> None:
        super().__init__(flow)
        self._send = send
        self._open_stream = open_stream
        self._stream: AsyncStepStream | None = None

    async def step(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None,
        **fields: Unpack[StepFields],
    ) -> StepReply:  # fmt: skip
        """Compute attention of new tokens over all tokens so far, and append them.

        ``query [B, Lq, d_model]``, any number of tokens; the other fields are those of ``Client.forward``. A reply that
        was lost is asked for again: no token is appended twice.
        """
        request, options = _request(StepRequest, query, key, value, fields)
        return await self._run(self._flow.step(request, options))

    async def fork(self, length: int | None = None, **options: Unpack[CallOptions]) -> "AsyncSession":
        """Return a copy of the session, or of its first ``length`` tokens. The two share the memory of equal pages."""
        made = await self._run(self._flow.fork(length, options))
        return AsyncSession(made, self._send, self._open_stream)

    async def truncate(self, length: int, **options: Unpack[CallOptions]) -> SessionInfo:
        """Forget all but the first ``length`` tokens."""
        return await self._run(self._flow.truncate(length, options))

    async def reorder(self, rows: Sequence[int], **options: Unpack[CallOptions]) -> SessionInfo:
        """Let sequence b continue what sequence ``rows[b]`` was; the number of rows is the new number of sequences."""
        request = validate(ReorderSession, {"rows": plain(rows)})
        return await self._run(self._flow.reorder(request, options))

    async def weights(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None,
        **fields: Unpack[WeightsFields],
    ) -> WeightsReply:  # fmt: skip
        """Return the weights of new tokens over all tokens so far. Nothing is appended. See ``Client.weights``."""
        request, options = _request(SessionWeightsRequest, query, key, value, fields)
        return await self._run(self._flow.ask(operations.session_weights, request, options))

    async def attribution(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None,
        **fields: Unpack[AttributionFields],
    ) -> AttributionReply:  # fmt: skip
        """Attribute to the weights of new tokens over all tokens so far. See ``Client.attribution``."""
        request, options = _request(SessionAttributionRequest, query, key, value, fields)
        return await self._run(self._flow.ask(operations.session_attribution, request, options))

    async def effects(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None,
        **fields: Unpack[EffectsFields],
    ) -> EffectsReply:  # fmt: skip
        """Return the effects of a sweep of edits on new tokens over all tokens so far. See ``Client.effects``."""
        request, options = _request(SessionEffectsRequest, query, key, value, fields)
        return await self._run(self._flow.ask(operations.session_effects, request, options))

    async def gradients(
        self, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None,
        **fields: Unpack[GradientsFields],
    ) -> GradientsReply:  # fmt: skip
        """Return gradients of new tokens over all tokens so far. Nothing is appended. See ``Client.gradients``.

        ``past_key`` and ``past_value`` in ``wrt`` are the cached keys and values.
        """
        request, options = _request(SessionGradientsRequest, query, key, value, fields)
        return await self._run(self._flow.ask(operations.session_gradients, request, options))

    async def info(self, **options: Unpack[CallOptions]) -> SessionInfo:
        """Return length, memory and expiry as the server knows them."""
        return await self._run(self._flow.ask(operations.get_session, None, options))

    async def cache(self, **options: Unpack[CallOptions]) -> SessionCache:
        """Return the keys and values: ``past_key [B, Hkv, P, D]`` and ``past_value [B, Hkv, P, Dv]``."""
        return await self._run(self._flow.cache(options))

    async def replace_cache(
        self, past_key: TensorLike, past_value: TensorLike, **options: Unpack[CallOptions]
    ) -> SessionInfo:
        """Replace the whole past by these keys and values."""
        request = validate(ReplaceCache, {"past_key": plain(past_key), "past_value": plain(past_value)})
        return await self._run(self._flow.replace_cache(request, options))

    @asynccontextmanager
    async def stream(self, stream: AsyncStepStream | None = None) -> AsyncIterator[AsyncStepStream]:
        """Send the steps within the block as messages of one connection: a new one, or one that sessions share."""
        own = stream is None
        self._stream = stream or self._open_stream()
        try:
            yield self._stream
        finally:
            if own:
                await self._stream.close()
            self._stream = None

    async def close(self, **options: Unpack[CallOptions]) -> None:
        """End the session and free its memory on the server."""
        await self._run(self._flow.close(options))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except AttentionError:
            if fault is None:
                raise

    async def _run(self, flow: Flow[ResultT]) -> ResultT:
        return await run_flow_awaited(flow, self._answer)

    async def _answer(self, call: Call[Any]) -> Any:
        """Send a call: a step on the stream, if there is one that works, else a request."""
        if self._stream is not None and isinstance(call.request, StepRequest):
            try:
                return await self._stream.answer(call)
            except _BY_REQUEST as fault:
                _check_repeats(fault)
        return await self._send(call)


def run_flow(flow: Flow[ResultT], answer: Send) -> ResultT:
    """Answer the calls of a flow, and return its result."""
    try:
        call = next(flow)
        while True:
            try:
                reply = answer(call)
            except AttentionError as fault:
                call = flow.throw(fault)
            else:
                call = flow.send(reply)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def run_flow_awaited(flow: Flow[ResultT], answer: AsyncSend) -> ResultT:
    """Answer the calls of a flow, and return its result."""
    try:
        call = next(flow)
        while True:
            try:
                reply = await answer(call)
            except AttentionError as fault:
                call = flow.throw(fault)
            else:
                call = flow.send(reply)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _request(
    model: type[ModelT], query: TensorLike, key: TensorLike | None, value: TensorLike | None, fields: Mapping[str, Any]
) -> tuple[ModelT, CallOptions]:
    """Validate the arguments of a method as a request, and part them from the options of its call."""
    given = {"query": query, "key": key, "value": value, **fields}
    options: CallOptions = {name: given.pop(name) for name in CallOptions.__annotations__ if name in given}  # type: ignore[assignment]
    return validate(model, {name: plain(item) for name, item in given.items() if item is not None}), options


def _check_repeats(fault: AttentionError) -> None:
    """Raise an error of a stream after which the caller waits no longer."""
    if isinstance(fault, DeadlineExceeded):
        raise fault

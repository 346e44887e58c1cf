"""Decode sessions: pasts that stay on the server."""

import ssl
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Concatenate, Final, Unpack, overload

from attention_client.arguments import (
    AttributionFields,
    EffectsFields,
    ForwardFields,
    GradientsFields,
    PolicyLike,
    SourceLike,
    StepLike,
    SweptEditLike,
    WeightsFields,
)
from attention_client.array_likes import TensorLike
from attention_client.calls.base import Call, CallOptions, call
from attention_client.calls.method import Awaited, Blocking, CallMethod, Flow, Group, P, WayT, method
from attention_client.sessions.live_session import AsyncSession, Session
from attention_client.sessions.session_flow import AFFINITY, SessionFlow, listed, opened, with_dtypes
from attention_client.streams.step_stream import AsyncStepStream, StepStream
from attention_contract import operations
from attention_contract.schemas.analyses.attribution import AttributionMethod, AttributionReply
from attention_contract.schemas.analyses.effects import EffectsReply
from attention_contract.schemas.attention import Tap
from attention_contract.schemas.gradients import GradientsReply
from attention_contract.schemas.sessions import (
    SessionCache,
    SessionInfo,
    SessionList,
    StepReply,
    StepRequest,
    StepsReply,
)
from attention_contract.schemas.weights import WeightsReply

KEEP_BYTES: Final = 2**28
"""Bytes of inputs that a session keeps for its replay, by default."""


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

    async def __aexit__(self, *fault: Any) -> None:
        if self._session is not None:
            await self._session.__aexit__(*fault)


def opening(stated: Callable[Concatenate[Any, P], Flow[SessionFlow]]) -> CallMethod[P, Session, Opening]:
    """Make a method of both clients that opens a session, from the function that states its flow."""

    def blocking(self: "Sessions[Blocking]", *args: Any, **kwargs: Any) -> Session:
        return Session.begin(stated(self, *args, **kwargs), self.send, self.stream)

    def awaited(self: "Sessions[Awaited]", *args: Any, **kwargs: Any) -> Opening:
        return Opening(AsyncSession.begin(stated(self, *args, **kwargs), self.send, self.stream))

    return CallMethod(stated, blocking, awaited)


class Sessions(Group[WayT]):
    """Calls about decode sessions. ``open`` returns a session with replay; the others are one request each."""

    @method
    def list(
        self, *, limit: int | None = None, cursor: str | None = None, **options: Unpack[CallOptions]
    ) -> Flow[SessionList]:
        """List every session and the memory of all. ``parent`` makes the list a tree.

        With ``limit`` or ``cursor``, one page: at most so many sessions, from the ``next`` of the page before on.
        """
        return listed(call(operations.list_sessions, locals()))

    @method
    def create(
        self, name: str, *, sequences: int | None = None, capacity: int | None = None, ttl_s: float | None = None,
        policy: PolicyLike | None = None, pinned: bool = False, share: bool = False, version: str | None = None,
        from_: SourceLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        **options: Unpack[CallOptions],
    ) -> Call[SessionInfo]:  # fmt: skip
        """Open a session of a module and return its id and facts; see ``open``. It is not repeated or replayed."""
        return call(operations.open_session, locals())

    @method
    def get(self, id: str, **options: Unpack[CallOptions]) -> Call[SessionInfo]:  # noqa: A002
        """Return module, length, memory and expiry of a session. Raises SessionNotFound or SessionGone."""
        return call(operations.get_session, locals())

    @method
    def delete(self, id: str, **options: Unpack[CallOptions]) -> Call[None]:  # noqa: A002
        """End a session and free its pages."""
        return call(operations.delete_session, locals())

    @method
    def step(
        self, id: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,  # noqa: A002
        at: int | None = None, step: str | None = None,
        return_: Sequence[Tap] = ("output",), average_heads: bool = False, return_state: bool = False,
        report_error: bool = False, **options: Unpack[ForwardFields],
    ) -> Call[StepReply]:  # fmt: skip
        """Compute attention of new tokens over all tokens of a session, and append them.

        ``query [B, Lq, d_model]``. ``at`` is the length that the session should have: LengthMismatch otherwise.
        ``step`` names the step: the server answers the last step again if it had this name, and appends nothing, so
        that a caller may repeat it. The other arguments are those of ``Client.forward``.
        """
        return _if_named(call(operations.step_session, locals()))

    @method
    def step_many(self, steps: Sequence[StepLike], **options: Unpack[CallOptions]) -> Call[StepsReply]:
        """Step many sessions at once: ``[{"session": id, "query": tokens}, …]``, at most 1,024.

        Each result is the reply of that step, or its problem document. All travel in one request and run together.
        """
        return call(operations.step_sessions, locals())

    @method
    def fork(
        self, id: str, length: int | None = None, *, capacity: int | None = None, ttl_s: float | None = None,  # noqa: A002
        pinned: bool = False, **options: Unpack[CallOptions],
    ) -> Call[SessionInfo]:  # fmt: skip
        """Copy a session, or its first ``length`` tokens. Both share the memory of all full pages."""
        return call(operations.fork_session, locals())

    @method
    def truncate(
        self, id: str, length: int, *, at: int | None = None, **options: Unpack[CallOptions],  # noqa: A002
    ) -> Call[SessionInfo]:  # fmt: skip
        """Forget all but the first ``length`` tokens of a session."""
        return call(operations.truncate_session, locals())

    @method
    def reorder(
        self, id: str, rows: Sequence[int], *, at: int | None = None, **options: Unpack[CallOptions],  # noqa: A002
    ) -> Call[SessionInfo]:  # fmt: skip
        """Let sequence b continue what sequence ``rows[b]`` was; the number of rows is the new number of sequences."""
        return call(operations.reorder_session, locals())

    @method
    def weights(
        self, id: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,  # noqa: A002
        at: int | None = None,
        top_k: int = 0, return_weights: bool = True, average_heads: bool = False, **options: Unpack[WeightsFields],
    ) -> Call[WeightsReply]:  # fmt: skip
        """Return the weights of new tokens over all tokens of a session; see ``Client.weights``. Appends nothing."""
        return call(operations.session_weights, locals())

    @method
    def attribution(
        self, id: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,  # noqa: A002
        at: int | None = None,
        methods: Sequence[AttributionMethod] = ("gradient_attention",), steps: int = 32,
        **options: Unpack[AttributionFields],
    ) -> Call[AttributionReply]:  # fmt: skip
        """Attribute to the weights of new tokens over all tokens of a session; see ``Client.attribution``."""
        return call(operations.session_attribution, locals())

    @method
    def effects(
        self, id: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,  # noqa: A002
        at: int | None = None, sweep: SweptEditLike, return_differences: bool = False, **options: Unpack[EffectsFields],
    ) -> Call[EffectsReply]:  # fmt: skip
        """Return the effects of a sweep of edits on new tokens over all tokens of a session; see ``Client.effects``."""
        return call(operations.session_effects, locals())

    @method
    def gradients(
        self, id: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,  # noqa: A002
        at: int | None = None,
        wrt: Sequence[str] = ("query",), check: bool = False, return_: Sequence[Tap] = ("output",),
        average_heads: bool = False, return_state: bool = False, report_error: bool = False,
        **options: Unpack[GradientsFields],
    ) -> Call[GradientsReply]:  # fmt: skip
        """Return gradients of new tokens over all tokens of a session; see ``Client.gradients``. Appends nothing.

        ``past_key`` and ``past_value`` in ``wrt`` are the cached keys and values.
        """
        return call(operations.session_gradients, locals())

    @method
    def cache(self, id: str, **options: Unpack[CallOptions]) -> Call[SessionCache]:  # noqa: A002
        """Return the keys and values of a session: ``[B, Hkv, P, D]`` and ``[B, Hkv, P, Dv]``."""
        return with_dtypes(call(operations.get_session_cache, locals()))

    @method
    def replace_cache(
        self, id: str, past_key: TensorLike, past_value: TensorLike, *, version: str | None = None,  # noqa: A002
        **options: Unpack[CallOptions],
    ) -> Call[SessionInfo]:  # fmt: skip
        """Replace the whole past of a session by these keys and values."""
        return call(operations.put_session_cache, locals())

    @opening
    def open(
        self, name: str, *, sequences: int | None = None, capacity: int | None = None, ttl_s: float | None = None,
        policy: PolicyLike | None = None, pinned: bool = False, share: bool = False, version: str | None = None,
        from_: SourceLike | None = None, past_key: TensorLike | None = None, past_value: TensorLike | None = None,
        keep_bytes: int = KEEP_BYTES, spill: bool = False, affinity: str | None = None,
        **options: Unpack[CallOptions],
    ) -> Flow[SessionFlow]:  # fmt: skip
        """Open a session of a module: ``with client.sessions.open("demo") as session: …``.

        ``capacity`` reserves memory for this many tokens; without it, a step may be refused while others take the
        memory. The session expires after ``ttl_s`` seconds without a request, and is not evicted for another if
        ``pinned``. ``policy`` chooses which tokens stay: ``{"name": "window_sinks", "window": 1024}``. ``share``
        holds equal prefixes of sessions once. It begins empty, with ``past_key [B, Hkv, P, D]`` and ``past_value``, or
        with another session's past: ``from_={"session": id, "length": 10}``.
        The session keeps up to ``keep_bytes`` of its inputs, to compute its past again after the server has lost it;
        ``spill`` writes what exceeds them to a temporary file.
        Before several servers, a proxy sends the calls of one ``affinity`` to the same server; by default each session
        has its own. Give equal ones to sessions that begin with each other's past, or that step together.
        """
        arguments = locals()
        kept = {name: arguments.pop(name) for name in ("keep_bytes", "spill", "affinity")}
        return opened(call(operations.open_session, arguments), **kept)

    @overload
    def stream(
        self: "Sessions[Blocking]", ssl: ssl.SSLContext | None = None, *, affinity: str | None = None
    ) -> StepStream: ...
    @overload
    def stream(
        self: "Sessions[Awaited]", ssl: ssl.SSLContext | None = None, *, affinity: str | None = None
    ) -> AsyncStepStream: ...
    def stream(
        self: "Sessions[Any]", ssl: ssl.SSLContext | None = None, *, affinity: str | None = None
    ) -> StepStream | AsyncStepStream:
        """Return a connection for steps of any sessions of one server, with the lowest latency, for a ``with`` block.

        Before several servers, ``affinity`` chooses the server, as it does in ``open``.
        """
        settings = self._client.stream_settings()
        if affinity is not None:
            settings = replace(settings, headers={**settings.headers, AFFINITY: affinity})
        return (AsyncStepStream if self._awaits else StepStream)(settings, ssl)


def _if_named(about: Call[StepReply]) -> Call[StepReply]:
    """The call as one that is safe to repeat, if its step has a name."""
    named = isinstance(about.request, StepRequest) and about.request.step is not None
    return replace(about, operation=replace(about.operation, safe_to_repeat=True)) if named else about

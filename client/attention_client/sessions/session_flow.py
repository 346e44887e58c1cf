"""A session's calls and its replay, without I/O: generators that yield calls and receive replies.

Both sessions, the blocking and the awaited one, run these flows. A fault of a call is raised inside the flow.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, cast
from uuid import uuid4

from attention_client.calls.base import Call, CallOptions, ReplyT
from attention_client.calls.method import Flow
from attention_client.errors import ConnectionFailed, UnexpectedReply
from attention_client.sessions.kept_inputs import Change, KeptInputs
from attention_contract import operations
from attention_contract.errors import (
    AttentionError,
    LengthMismatch,
    ModuleNotFound,
    SessionGone,
    SessionNotFound,
    VersionMismatch,
)
from attention_contract.operations import Operation
from attention_contract.schemas.sessions import (
    ForkSession,
    FullPolicy,
    ListSessions,
    OpenSession,
    ReorderSession,
    ReplaceCache,
    SessionCache,
    SessionInfo,
    SessionList,
    StepReply,
    StepRequest,
    TruncateSession,
)
from attention_contract.wire import SAFETENSORS

AFFINITY: Final = "x-session-id"
"""The header by which a proxy before several servers sends all calls of a session to the same one."""
MOST_REPLAYS: Final = 3
"""Replays of a session in a row without a call that succeeds."""
_log = logging.getLogger("attention_client")


def _repeatable(operation: Operation[Any]) -> Operation[Any]:
    """The operation as one that is safe to repeat, in a session that only its owner changes."""
    return replace(operation, safe_to_repeat=True)


def _together(call: Call[ReplyT], affinity: str) -> Call[ReplyT]:
    """The call as one for the server that holds all sessions of this affinity."""
    return replace(call, headers={**call.headers, AFFINITY: affinity})


_OPEN = _repeatable(operations.open_session)
_FORK = _repeatable(operations.fork_session)
"""A session or a fork whose reply was lost expires."""
_STEP_CALL = _repeatable(operations.step_session)
"""A step has an id of its own."""
_CLOSE = _repeatable(operations.delete_session)
"""One that is gone already is closed."""


@dataclass
class SessionFlow:
    """One session as its owner knows it."""

    module: str
    version: str
    id: str
    length: int
    sequences: int
    opening: OpenSession
    """The request that opens another session like it, empty."""
    kept: KeptInputs
    affinity: str
    """Equal for the sessions that one server process must hold together."""
    replays: int = 0

    def step(self, call: Call[StepReply]) -> Flow[StepReply]:
        """Append the tokens of a step."""
        request = cast("StepRequest", call.request)
        named = {"step": request.step or uuid4().hex}

        def make_call() -> Call[StepReply]:
            return replace(call, operation=_STEP_CALL, request=request.model_copy(update={"at": self.length, **named}))

        try:
            reply: StepReply = yield from self._alive(make_call)
        except LengthMismatch as fault:
            if fault.param != "step":
                raise
            reply = yield from self._replayed(f"the reply to a step was lost: {fault.detail}", make_call)
        self.kept.add(self.length, request)
        self.length = reply.length
        return reply

    def ask(self, call: Call[ReplyT]) -> Flow[ReplyT]:
        """Ask something that changes nothing."""
        return (yield from self._alive(lambda: call))

    def fork(self, length: int | None, options: CallOptions) -> Flow["SessionFlow"]:
        """Copy the session. The copy keeps the same inputs."""
        request = ForkSession(length=length, **self.opening.model_dump(include={"capacity", "ttl_s", "pinned"}))
        made: SessionInfo = yield from self.ask(Call(_FORK, request=request, options=options))
        kept = self.kept.copy()
        kept.truncate(made.length, self.length)
        return replace(self, id=made.session, length=made.length, kept=kept, replays=0)

    def truncate(self, call: Call[SessionInfo]) -> Flow[SessionInfo]:
        """Forget the last tokens."""
        info: SessionInfo = yield from self.ask(call)
        self.kept.truncate(cast("TruncateSession", call.request).length, self.length)
        self.length = info.length
        return info

    def reorder(self, call: Call[SessionInfo]) -> Flow[SessionInfo]:
        """Let sequences continue others. After a lost reply nobody knows their order, so the session is replayed."""
        try:
            info = yield from self.ask(call)
        except (ConnectionFailed, UnexpectedReply) as fault:
            if not fault.facts.get("sent", True):
                raise
            info = yield from self._replayed(f"the reply to a reorder was lost: {fault.detail}", lambda: call)
        self.kept.add(self.length, cast("ReorderSession", call.request))
        self.sequences = info.sequences
        return info

    def replace_cache(self, call: Call[SessionInfo]) -> Flow[SessionInfo]:
        """Replace the whole past."""
        info: SessionInfo = yield from self.ask(call)
        self.kept.replace(cast("ReplaceCache", call.request))
        self.length, self.sequences = info.length, info.sequences
        return info

    def close(self, options: CallOptions) -> Flow[None]:
        """End the session on the server, if it is still there."""
        with suppress(SessionGone, SessionNotFound):
            yield self._own(Call(_CLOSE, options=options))

    def _own(self, call: Call[ReplyT]) -> Call[ReplyT]:
        """The call as one about this session, for the server that holds it."""
        return _together(replace(call, path={"id": self.id}), self.affinity)

    # ── replay ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _alive(self, make_call: Callable[[], Call[ReplyT]]) -> Flow[ReplyT]:
        """Ask of the session, and again of the one that replaces it after the server has lost it."""
        gone: AttentionError | None = None
        for _ in range(MOST_REPLAYS):
            call = make_call()
            try:
                if gone is not None:
                    yield from self._replay(gone, call.options)
                return cast("ReplyT", (yield self._own(call)))
            except (SessionGone, SessionNotFound) as fault:  # not found: a server that does not remember its end
                gone = self._replayable(fault)
        raise cast("AttentionError", gone)

    def _replayed(self, lost: str, make_call: Callable[[], Call[ReplyT]]) -> Flow[ReplyT]:
        """Ask of a session that replaces this one, of which only the server knows the state."""
        yield from self._replay(self._replayable(SessionGone(lost, reason="lost")), make_call().options)
        return (yield from self._alive(make_call))

    def _replayable(self, gone: AttentionError) -> AttentionError:
        """Return the fault of a session that can be replayed. Raise SessionGone, with the reason, for another."""
        if gone.facts.get("reason") == "deleted":
            raise gone
        if self.kept.missing is not None:
            raise SessionGone(f"{gone.detail}; it cannot be replayed: {self.kept.missing}", **gone.facts) from gone
        return gone

    def _replay(self, gone: AttentionError, options: CallOptions) -> Flow[None]:
        """Open another session and compute the past again."""
        changes, opening, lost = list(self.kept.changes()), self.opening, self.id
        if changes and isinstance(past := changes[0], ReplaceCache):
            del changes[0]
            opening = opening.model_copy(
                update={"sequences": None, "past_key": past.past_key, "past_value": past.past_value}
            )
        try:
            info: SessionInfo = yield _together(
                Call(_OPEN, {"name": self.module}, opening, options=options), self.affinity
            )
        except (VersionMismatch, ModuleNotFound) as fault:
            self.kept.missing = f"its module has changed: {fault.detail}"
            raise gone from fault
        self.id, tokens = info.session, info.length
        for change in changes:
            tokens = (yield self._again(change, tokens, options)).length
        self.replays += 1
        reason = gone.facts.get("reason", "lost")
        _log.warning("session %s is gone (%s); replayed %d tokens as session %s", lost, reason, tokens, self.id)

    def _again(self, change: Change, length: int, options: CallOptions) -> Call[Any]:
        if isinstance(change, StepRequest):
            request = change.model_copy(update={"at": length, "step": uuid4().hex})
            return self._own(Call(_STEP_CALL, request=request, options=options))
        reorders = isinstance(change, ReorderSession)
        operation = operations.reorder_session if reorders else operations.truncate_session
        return self._own(Call(operation, request=change, options=options))


def opened(call: Call[SessionInfo], keep_bytes: int, *, spill: bool, affinity: str | None) -> Flow[SessionFlow]:
    """Open a session, and keep its inputs from now on."""
    affinity = affinity or uuid4().hex
    info: SessionInfo = yield _together(replace(call, operation=_OPEN), affinity)
    request = call.request
    assert isinstance(request, OpenSession)  # noqa: S101 - the operation's model
    kept = KeptInputs(keep_bytes, spill, joins=isinstance(request.policy, FullPolicy))
    if request.from_ is not None:
        kept.missing = "it began with another session's past"
    if request.past_key is not None:
        kept.add(0, ReplaceCache(past_key=request.past_key, past_value=request.past_value))
    again = {"sequences": info.sequences, "version": info.version, "from_": None, "past_key": None, "past_value": None}
    opening = request.model_copy(update=again)
    return SessionFlow(info.module, info.version, info.session, info.length, info.sequences, opening, kept, affinity)


def listed(call: Call[SessionList]) -> Flow[SessionList]:
    """Read every page of the list, or the one that the call names."""
    reply: SessionList = yield call
    named = bool(call.request and call.request.model_fields_set)
    sessions, after = list(reply.sessions), None if named else reply.next
    while after is not None:
        reply = yield replace(call, request=ListSessions(cursor=after))
        sessions, after = sessions + reply.sessions, reply.next
    return reply.model_copy(update={"sessions": sessions})


def with_dtypes(call: Call[SessionCache]) -> Call[SessionCache]:
    """The call whose reply travels as safetensors: lists in JSON do not tell their dtype."""
    return replace(call, headers={**call.headers, "Accept": SAFETENSORS})

"""The operations of decode sessions: opening, steps, forks, truncation, and questions over the past."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from torch import Tensor

from attention_contract.base import valid
from attention_contract.errors import (
    AttentionError,
    InternalError,
    InvalidRequest,
    LengthMismatch,
    OverBudget,
    Overloaded,
)
from attention_contract.frames import problem_of
from attention_contract.schemas.sessions import (
    ForkSession,
    FullPolicy,
    ListSessions,
    OpenSession,
    ReorderSession,
    ReplaceCache,
    SessionAttributionRequest,
    SessionCache,
    SessionEffectsRequest,
    SessionGradientsRequest,
    SessionInfo,
    SessionList,
    SessionWeightsRequest,
    StepProblem,
    StepReply,
    StepRequest,
    StepsReply,
    StepsRequest,
    TruncateSession,
)
from attention_service.core.kv_cache.block_table import BlockTable
from attention_service.core.kv_cache.paged_trial import paged_fault
from attention_service.core.kv_cache.pages import PagePool
from attention_service.core.kv_cache.policies import keeper_of
from attention_service.core.kv_cache.slab import page_tokens
from attention_service.modules.library import Library
from attention_service.modules.resident import Module
from attention_service.runtime.binding.recurrence_binding import check_past
from attention_service.runtime.callers import caller
from attention_service.runtime.operations.questions import QUESTIONS
from attention_service.runtime.scheduling.request_runner import RequestRunner
from attention_service.runtime.sessions import step, step_operation
from attention_service.runtime.sessions.decode_session import DecodeSession, bytes_of, page_kind
from attention_service.runtime.sessions.page_budget import PageBudget
from attention_service.runtime.sessions.session_registry import SessionRegistry
from attention_service.runtime.sessions.shared_prefixes import Prefix, is_shareable, share

SessionQuestion = SessionWeightsRequest | SessionAttributionRequest | SessionEffectsRequest | SessionGradientsRequest
_KEPT_BYTES = 2**16
"""Bytes of a reply that is kept, at most; the step of a larger one is computed again. 64 tokens of 256 numbers."""
log = logging.getLogger(__name__)


class LiveSessions:
    """The sessions of one engine. Used from the event loop only."""

    def __init__(
        self,
        library: Library,
        runner: RequestRunner,
        ttl_s: float,
        limit: int,
        pinned_limit: int,
        most: int = 4096,
        *,
        siblings: bool = False,
    ) -> None:
        """``limit`` and ``pinned_limit``: bytes that the pages of all and of pinned sessions may take.

        ``most``: the number of sessions. ``siblings``: other processes have sessions too.
        """
        self.pool = PagePool(limit, lambda: runner.budget.available)
        self.registry = SessionRegistry(runner.check_ready, runner.budget.wake, most, siblings=siblings)
        self._library, self._runner = library, runner
        self._ttl_s = ttl_s
        evict = partial(self.registry.end, reason="evicted")
        self._page_budget = PageBudget(
            self.pool, runner.budget, limit, pinned_limit, self.registry.totals, lambda: self.registry.live, evict
        )

    async def choose_kernel(self) -> None:
        """Let PyTorch's kernel for block tables compute steps on a GPU if a trial succeeds; once, at the start."""
        device = self._runner.device
        if not device.is_cuda:
            return
        fault = await self._runner.executor.call(partial(paged_fault, device.torch))
        if fault is not None:  # of the kernel, or of a device that computes nothing any more
            await self._runner.executor.call(device.probe)
        self.pool.paged = fault is None
        if fault is None:
            log.info("steps of sessions in half types read their pages by PyTorch's kernel for block tables")
        else:
            log.warning("steps of sessions are computed by products: PyTorch's kernel for block tables: %s", fault)

    @property
    def kernel(self) -> Literal["paged", "products"]:
        """The computation of steps in place."""
        return "paged" if self.pool.paged else "products"

    @property
    def free_bytes(self) -> int:
        """Bytes of the sessions' share of memory that no page takes."""
        return max(self._page_budget.limit - self.pool.bytes, 0)

    # ── life of a session ────────────────────────────────────────────────────────────────────────────────────────────

    async def open(self, name: str, request: OpenSession) -> SessionInfo:
        """Open a session, empty or with a past. Raises what ``PageBudget.reserve`` does, and InvalidRequest."""
        self._runner.check_ready()
        module = self._library.get(name, request.version)
        check_past(module.config.spec, "name")
        if request.from_ is not None:
            async with self.registry.turn(request.from_.session) as source:
                _check_source(source, module, request)
                return self._forked(source, request.from_.length, request, "from.length").info()
        past = None
        if request.past_key is not None and request.past_value is not None:
            past = step.bind_past(module, request.sequences, request.past_key, request.past_value)
            step.check_capacity(request.capacity, 0, past[0].shape[2], "capacity")
        sequences = request.sequences or (1 if past is None else past[0].shape[0])
        session = self._new(module, sequences, request)
        if request.share and past is None and session.keeper is None:
            size = page_kind(module).page_tokens
            session.prefixes = [Prefix(_salt(module), size) for _ in session.tables]
        try:
            self._page_budget.reserve(session, request.capacity or 0)
            if past is not None:
                self._page_budget.reserve(session, past[0].shape[2])
                await self._written(session, past)
        except BaseException:
            self.registry.clear(session)
            raise
        return self.registry.add(session).info()

    async def fork(self, id: str, request: ForkSession) -> SessionInfo:  # noqa: A002 - the path's name
        """Copy a session without copying its full pages."""
        async with self.registry.turn(id) as source:
            return self._forked(source, request.length, request, "length").info()

    async def delete(self, id: str) -> None:  # noqa: A002
        """End a session. Its pages are free once nothing runs over them."""
        self.registry.end(self.registry.get(id), "deleted")

    def info(self, id: str) -> SessionInfo:  # noqa: A002
        """One session."""
        return self.registry.get(id).info()

    def listing(self, request: ListSessions) -> SessionList:
        """One page of the caller's sessions, and the memory of all."""
        sessions, more = self.registry.page(int(request.cursor or 0), request.limit)
        return SessionList(
            sessions=[session.info() for session in sessions],
            next=str(sessions[-1].serial) if more else None,
            total=self.registry.of_caller(),
            page_tokens=page_tokens(self._runner.device.torch),
            pages=self.pool.pages,
            shared_pages=self.pool.shared_pages,
            bytes=self.pool.bytes,
        )

    async def truncate(self, id: str, request: TruncateSession) -> SessionInfo:  # noqa: A002
        """Forget the last tokens."""
        async with self.registry.turn(id) as session:
            step.check_at(session.length, request.at)
            self._cut(session, request.length, "length")
            self._remember(session, None, None)
            with suppress(Overloaded, OverBudget):  # where others share the pages that it gave back
                self._page_budget.reserve(session, (session.capacity or 0) - session.held)
            return session.info()

    async def reorder(self, id: str, request: ReorderSession) -> SessionInfo:  # noqa: A002
        """Let each sequence continue another one's past."""
        async with self.registry.turn(id) as session:
            step.check_at(session.length, request.at)
            count = len(session.tables)
            if (largest := max(request.rows)) >= count:
                raise InvalidRequest.at(
                    "rows",
                    f"{largest} is out of range; the session has {count} sequences, numbered from 0",
                    limit=count,
                )
            self._continue_rows(session, request.rows)
            if session.keeper is not None:
                session.keeper.reorder(request.rows)
            if session.prefixes is not None:
                session.prefixes = [session.prefixes[row].copy() for row in request.rows]
            self._remember(session, None, None)
            return session.info()

    # ── questions over the past ──────────────────────────────────────────────────────────────────────────────────────

    async def step(self, id: str, request: StepRequest, deadline: float | None = None) -> StepReply:  # noqa: A002
        """Run a forward pass over new tokens, and append them. A step that fails appends nothing."""
        async with self.registry.turn(id) as session:
            began = session.length
            if request.step is not None and request.step == session.step:
                if session.reply is not None:
                    return session.reply
                began = session.began
            step.check_at(began, request.at)
            session.module.check_version(request.version)
            new = step.new_tokens(session, request)
            step.check_capacity(session.capacity, session.held - (session.length - began), new, "query")
            if began != session.length:
                self._take_back(session)
            self._page_budget.reserve(session, new)
            reply = await step.step(self._runner, session, request, new, deadline)
            if session.prefixes is not None and not is_shareable(request):
                session.prefixes = None
            if session.prefixes is not None:
                share(self.pool, session.tables, session.prefixes, request)
            session.began = began
            self._remember(session, request.step, reply)
            self.registry.counts["steps"] += 1
            self.registry.counts["tokens"] += new * len(session.tables)
            return reply

    async def steps(self, request: StepsRequest, deadline: float | None = None) -> StepsReply:
        """Run steps of many sessions, each with its own reply or problem."""
        running = [self.step(step.session, step, deadline) for step in request.steps]
        answers = await asyncio.gather(*running, return_exceptions=True)
        outcomes = [
            _problem(step.session, answer) if isinstance(answer, BaseException) else answer
            for step, answer in zip(request.steps, answers, strict=True)
        ]
        return valid(StepsReply, {"steps": outcomes})

    async def ask(
        self, question: str, id: str, request: SessionQuestion, deadline: float | None = None  # noqa: A002
    ) -> Any:  # fmt: skip
        """The reply to one of ``QUESTIONS`` about new tokens over the past. Appends nothing."""
        prepare, reply = QUESTIONS[question]
        async with self.registry.turn(id) as session:
            step.check_at(session.length, request.at)
            session.module.check_version(request.version)
            step.new_tokens(session, request)
            over, rows = partial(step_operation.over_past, prepare), step.readable(session.tables)
            fields, ran = await step.run_over_past(self._runner, session, over, request, deadline, rows)
            return valid(reply, fields | {"ran": ran})

    async def cache(self, id: str) -> SessionCache:  # noqa: A002
        """Return the keys and values that a session holds."""
        async with self.registry.turn(id) as session:
            need = 2 * len(session.tables) * session.held * page_kind(session.module).token_bytes
            await self._runner.host.acquire(need)
            try:
                past = await self._runner.in_thread(partial(step.past_of, session))
            finally:
                self._runner.host.release(need)
            return SessionCache(session=session.id, version=session.module.version, length=session.length, **past)

    async def replace_cache(self, id: str, request: ReplaceCache) -> SessionInfo:  # noqa: A002
        """Replace the whole past of a session of policy ``full``."""
        async with self.registry.turn(id) as session:
            session.module.check_version(request.version)
            if session.keeper is not None:
                raise InvalidRequest.at(
                    "past_key",
                    f"the state of policy {session.policy.name} depends on its past; only a session of "
                    "policy full can replace its past",
                )
            past = step.bind_past(session.module, len(session.tables), request.past_key, request.past_value)
            tokens = past[0].shape[2]
            step.check_capacity(session.capacity, 0, tokens, "past_key")
            fresh = self._new(session.module, len(session.tables), OpenSession())
            try:
                self._page_budget.reserve(fresh, max(session.capacity or 0, tokens), session)
                await self._written(fresh, past)
            except BaseException:
                self.registry.clear(fresh)
                raise
            session.clear()
            session.tables, fresh.tables = fresh.tables, []
            session.length, session.prefixes = tokens, None
            self.registry.totals.count(fresh)
            self._remember(session, None, None)
            return session.info()

    async def _written(self, session: DecodeSession, past: tuple[Tensor, Tensor]) -> None:
        """Let an empty session hold a past. If the caller leaves, wait for the thread that writes to its pages.

        For a GPU that is the thread of its long jobs, which has a stream of its own.
        """
        run = self._runner.executor.call if self._runner.device.is_cuda else self._runner.in_thread
        work = asyncio.ensure_future(run(partial(step.begin_with, session, *past)))
        try:
            await asyncio.shield(work)
        finally:
            await asyncio.wait([work])

    # ── keeping ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _remember(self, session: DecodeSession, step: str | None, reply: StepReply | None) -> None:
        """Keep the reply to the last step if it has an id and is small, so that it can come again."""
        if session.reply is not None:
            self.registry.forget_reply(session)
        session.step = step
        if step is None or reply is None or session.gone is not None or (size := bytes_of(reply)) > _KEPT_BYTES:
            return
        session.reply, session.reply_bytes = reply, size
        self.registry.reply_bytes += size

    def _take_back(self, session: DecodeSession) -> None:
        """Forget the tokens of the last step, whose reply was not kept: the step comes again.

        Raises LengthMismatch where the policy has dropped tokens for them.
        """
        try:
            self._cut(session, session.began, "step")
        except InvalidRequest as fault:
            raise LengthMismatch.at(
                "step",
                f"the reply to {session.step!r} was too large to be kept, and policy {session.policy.name} "
                f"cannot compute it again. The step's tokens are appended; go on from length {session.length}",
                expected=session.began,
                actual=session.length,
            ) from fault
        self._remember(session, None, None)

    def _new(self, module: Module, sequences: int, request: OpenSession) -> DecodeSession:
        """A session without tokens. Raises InvalidRequest for a policy that the module's spec does not allow."""
        sizes, kind = module.sizes, page_kind(module)
        keeper = keeper_of(request.policy, module.config.spec, sizes.kv_heads, sizes.heads)
        tables = [BlockTable(self.pool, kind) for _ in range(sequences)]
        whole = None
        if not isinstance(request.policy, FullPolicy) and request.policy.report_error:
            whole = [BlockTable(self.pool, kind) for _ in range(sequences)]
        return DecodeSession(
            self.registry.new_id(), module, tables, request.policy,
            min(request.ttl_s or self._ttl_s, self._ttl_s), keeper, whole,
            capacity=request.capacity, pinned=request.pinned,
        )  # fmt: skip

    def _forked(
        self, source: DecodeSession, length: int | None, request: OpenSession | ForkSession, param: str
    ) -> DecodeSession:
        """A session that begins with the first tokens of another and shares their pages."""
        session = DecodeSession(
            self.registry.new_id(), source.module, [table.fork() for table in source.tables],
            source.policy, min(request.ttl_s or source.ttl_s, self._ttl_s),
            None if source.keeper is None else source.keeper.copy(),
            None if source.whole is None else [table.fork() for table in source.whole],
            None if source.prefixes is None else [prefix.copy() for prefix in source.prefixes],
            source.length, request.capacity, request.pinned, source.id,
        )  # fmt: skip
        try:
            if length is not None:
                self._cut(session, length, param)
            step.check_capacity(session.capacity, 0, session.held, "capacity")
            self._page_budget.reserve(session, (session.capacity or 0) - session.held, source)
            # A page that both use now is copied by the first who writes to it.
            self._page_budget.reserve(source, (source.capacity or 0) - source.held, session)
        except BaseException:
            self.registry.clear(session)
            raise
        return self.registry.add(session)

    def _continue_rows(self, session: DecodeSession, rows: Sequence[int]) -> None:
        """Let each new sequence have the tokens of an old one. If PageBudget refuses, nothing has changed.

        Spare pages of the old sequences are free for the new ones.
        """
        more, tables, whole = (session.capacity or 0) - session.held, session.tables, session.whole
        old = session.all_tables
        for table in old:
            table.trim()
        session.tables = [tables[row].fork() for row in rows]
        session.whole = None if whole is None else [whole[row].fork() for row in rows]
        try:
            self._page_budget.reserve(session, more)
        except BaseException:
            session.clear()
            session.tables, session.whole = tables, whole
            for table in old:
                table.reserve(more)
            raise
        for table in old:
            table.clear()

    def _cut(self, session: DecodeSession, length: int, param: str) -> None:
        """Forget all but the first tokens. Raises InvalidRequest if there are fewer, or if the policy cannot."""
        if length > session.length:
            raise InvalidRequest.at(
                param,
                f"the session has {session.length} tokens; expected at most as many, got {length}",
                limit=session.length,
            )
        dropped = session.length - length
        if session.keeper is not None:
            session.keeper.truncate(dropped, session.held, session.length)
        for table in session.all_tables:
            table.truncate(table.tokens - dropped)
        session.length = length
        if session.prefixes is not None and not all(prefix.cut(length) for prefix in session.prefixes):
            session.prefixes = None


def _salt(module: Module) -> bytes:
    """The beginning of the names of shared pages: pages are shared by the sessions of one owner.

    Otherwise the bytes of a session would tell its owner which pasts others have.
    """
    asks = caller.get()
    return module.version.encode() + (b"" if asks.manages else b"/" + asks.name.encode())


def _check_source(source: DecodeSession, module: Module, request: OpenSession) -> None:
    """Raise InvalidRequest unless a new session of the module can begin with the past of another."""
    if source.module is not module:
        raise InvalidRequest.at(
            "from.session",
            f"it is a session of module {source.module.name!r} at version {source.module.version}, not "
            f"of {module.name!r} at {module.version}; open it of the same module and version",
        )
    if request.sequences not in {None, len(source.tables)}:
        raise InvalidRequest.at(
            "sequences",
            f"the other session has {len(source.tables)}, got {request.sequences}; leave it out, and "
            "reorder the new session",
        )
    if "policy" in request.model_fields_set and request.policy != source.policy:
        raise InvalidRequest.at(
            "policy", f"the other session's is {source.policy.name}, and the new session has the same; leave it out"
        )


def _problem(session: str, fault: BaseException) -> StepProblem:
    """The problem document of one of many steps. Raises what is no answer, such as a cancellation."""
    if not isinstance(fault, Exception):
        raise fault
    if isinstance(fault, AttentionError):
        error: AttentionError = fault
    else:
        log.error("a step failed", exc_info=fault)
        error = InternalError("the step failed; the server's log has the cause")
    return problem_of(error, session)

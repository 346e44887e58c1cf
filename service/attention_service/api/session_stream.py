"""``WS /v1/sessions/stream``: steps of sessions as messages of one connection, for the lowest latency.

A message is one step or many. Steps of one session keep their order; replies of different sessions come as they are
ready. After ``MAX_UNANSWERED`` messages without a reply the server stops reading.
"""

import asyncio
import time
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from starlette.types import Message, Receive, Scope, Send

from attention_contract.base import WireModel
from attention_contract.errors import AttentionError, BodyTooLarge, Cancelled
from attention_contract.frames import MAX_FRAME_BYTES, MAX_UNANSWERED, problem_of, request_from_frame
from attention_contract.json_writing import tensor_bytes
from attention_contract.operations import Operation, step_session, step_sessions
from attention_contract.schemas.sessions import SessionStep, StepsRequest
from attention_contract.tensors import Encoding
from attention_contract.wire import JSON, SAFETENSORS
from attention_service.api import problems
from attention_service.api.access.layer import PROTOCOL
from attention_service.api.access.quotas import Quotas
from attention_service.api.bodies import negotiation
from attention_service.api.bodies.request_body import parsed
from attention_service.api.disconnection import in_time
from attention_service.api.endpoint import RequestContext, call_of
from attention_service.api.handlers import HANDLERS
from attention_service.api.observation.access_log import Answered
from attention_service.api.observation.telemetry import RequestLog
from attention_service.api.request_head import wait_seconds
from attention_service.runtime.callers import caller
from attention_service.runtime.request_timing import RequestTiming, note, note_bytes, timing
from attention_service.runtime.scheduling.budget import UNCOUNTED, BodyMemory
from attention_service.settings import Settings

PATH: Final = "/v1/sessions/stream"
_GOING_AWAY: Final = 1001


class SessionStreams:
    """The ASGI application at ``PATH``, and the connections that are open."""

    def __init__(self, requests: RequestLog, quotas: Quotas) -> None:
        self._requests = requests
        self._quotas = quotas
        self._open: set[StreamConnection] = set()

    def __len__(self) -> int:
        """Return the number of open connections."""
        return len(self._open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection until either side ends it."""
        identity = problems.request_id.get() or ""
        spoken = PROTOCOL in scope.get("subprotocols", ())
        try:
            call = call_of(scope)
            call.engine.runner.check_ready()
        except AttentionError as error:
            await problems.render(error)(scope, receive, send)
            return
        wait = wait_seconds(call.headers, call.settings.default_wait_s)
        connection = StreamConnection(call, wait, receive, send, self._requests, self._quotas)
        self._open.add(connection)
        try:
            await connection.serve(identity, PROTOCOL if spoken else None)
        finally:
            self._open.discard(connection)

    async def close(self, wait_s: float | None) -> None:
        """Answer the messages that came, for at most ``wait_s`` seconds, and close every connection."""
        await asyncio.gather(*(connection.leave(wait_s) for connection in self._open))


@dataclass(eq=False, slots=True)
class StreamConnection:
    """One connection, its unanswered messages among them."""

    call: RequestContext
    wait: float | None
    """Seconds that the caller waits for each reply; None for any."""
    receive: Receive
    send: Send
    requests: RequestLog
    quotas: Quotas
    count: int = 0
    """Number of messages so far."""
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_UNANSWERED))
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    last: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """The latest unanswered message about each session."""

    async def serve(self, identity: str, protocol: str | None) -> None:
        """Accept the subprotocol, read messages and answer each in a task of its own, until the caller is gone."""
        await self.receive()
        await self.send({"type": "websocket.accept", "subprotocol": protocol, "headers": []})
        try:
            while True:
                await self.slots.acquire()
                message = await self.receive()
                if message["type"] != "websocket.receive":
                    return
                self.count += 1
                problems.request_id.set(f"{identity}/{self.count}")  # the task inherits it
                timing.set(RequestTiming())
                await self._begin(message)
        finally:
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)

    async def leave(self, wait_s: float | None) -> None:
        """Answer the messages that came, for at most ``wait_s`` seconds, and close the connection."""
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=wait_s)
        await self._send({"type": "websocket.close", "code": _GOING_AWAY, "reason": "the server is stopping"})

    async def _begin(self, message: Message) -> None:
        """Read a message and begin its task. Messages are read one at a time, so that steps keep their order."""
        started = time.perf_counter()
        text, memory, held = message.get("text"), BodyMemory(self.call.engine.host), ExitStack()
        held.callback(memory.give_back)
        request: SessionStep | StepsRequest | None = None
        try:
            held.enter_context(self.quotas.used(caller.get()))
            request = await _read(message["bytes"] if text is None else text, memory, self.call.settings)
            work = self._run(request)
        except AttentionError as error:
            work = _refuse(error)
        sessions = _sessions_of(request)
        before = {self.last[session] for session in sessions if session in self.last}
        task = asyncio.create_task(self._reply(request, work, started, before, memory, text=text is not None))
        self.tasks.add(task)
        self.last.update(dict.fromkeys(sessions, task))
        task.add_done_callback(partial(self._end, sessions, work, held))

    def _end(
        self, sessions: Sequence[str], work: Coroutine[Any, Any, WireModel], held: ExitStack,
        task: asyncio.Task[None],
    ) -> None:  # fmt: skip
        """Forget a message. Its task may have been cancelled before it began."""
        work.close()
        held.close()
        self.tasks.discard(task)
        self.slots.release()
        for session in sessions:
            if self.last.get(session) is task:
                del self.last[session]

    async def _run(self, request: SessionStep | StepsRequest) -> WireModel:
        """Answer a message as the request that it is, by the handler of its operation."""
        deadline = None if self.wait is None else time.monotonic() + self.wait
        path = {} if isinstance(request, StepsRequest) else {"id": request.session}
        call = replace(self.call, path=path, deadline=deadline)
        reply: WireModel = await in_time(HANDLERS[_operation_of(request).name](call, request), deadline)
        return reply

    async def _reply(
        self, request: SessionStep | StepsRequest | None, work: Awaitable[WireModel], started: float,
        before: set[asyncio.Task[None]], memory: BodyMemory, *, text: bool,
    ) -> None:  # fmt: skip
        """Send the reply to one message, or its problem document, after those of messages ``before`` it.

        Count and log it like a request. ``memory`` holds the reply until the caller has taken it.
        """
        status, session = 200, request.session if isinstance(request, SessionStep) else None
        failure: AttentionError | None = None
        write = partial(_written, encoding="list" if request is None else request.encoding, text=text)
        try:
            try:
                reply = await work
                began = time.monotonic()
                frame = await write(reply)
                note("encode", began)
                if len(frame) > UNCOUNTED:
                    memory.become_reply(len(frame))
            except AttentionError as error:
                failure = error
            except Exception as fault:
                failure = problems.unexpected(PATH, fault)
            if failure is not None:
                problems.note(failure)
                frame, status = await write(problem_of(failure, session)), failure.status
                problems.forget(failure)
            if before:
                await asyncio.wait(before)
            began = time.monotonic()
            await self._send({"type": "websocket.send", "text" if text else "bytes": frame})
            note("write", began)
        except asyncio.CancelledError:
            status = Cancelled.status
            raise
        finally:
            operation = _operation_of(request)
            seconds, identity = time.perf_counter() - started, problems.request_id.get() or ""
            noted, name = timing.get() or RequestTiming(), caller.get().name
            self.requests.add(Answered(time.time(), "WS", PATH, operation.name, status, seconds, identity, name, noted))

    async def _send(self, message: Message) -> None:
        with suppress(OSError, RuntimeError):  # the connection is gone, or closing
            await self.send(message)


def _operation_of(request: SessionStep | StepsRequest | None) -> Operation[Any]:
    return step_sessions if isinstance(request, StepsRequest) else step_session


def _sessions_of(request: SessionStep | StepsRequest | None) -> Sequence[str]:
    """The sessions that a message is about."""
    if isinstance(request, StepsRequest):
        return [step.session for step in request.steps]
    return () if request is None else (request.session,)


async def _read(frame: str | bytes, memory: BodyMemory, settings: Settings) -> SessionStep | StepsRequest:
    """Read a message as a body is read. Raises what the contract or ``memory`` raises, and BodyTooLarge."""
    text, most = isinstance(frame, str), min(MAX_FRAME_BYTES, settings.max_body_bytes)
    if len(frame) > most:
        detail = f"the message has at least {len(frame)} bytes; a stream takes up to {most}. Send it as a request"
        raise BodyTooLarge(detail, limit_bytes=most, needed_bytes=len(frame))
    if text and len(frame) > settings.max_json_bytes:
        raise BodyTooLarge(
            f"the message has {len(frame)} characters of JSON; this server reads up to {settings.max_json_bytes}. Send "
            "it as safetensors",
            limit_bytes=settings.max_json_bytes,
            needed_bytes=len(frame),
        )
    body = memoryview(frame.encode() if isinstance(frame, str) else frame)
    note_bytes(len(body))
    if not text and len(body) > UNCOUNTED:
        memory.hold(len(body))
    return await parsed(body, request_from_frame, JSON if text else SAFETENSORS, settings, memory)


async def _written(reply: WireModel, encoding: Encoding, *, text: bool) -> str | bytes:
    form, size = (JSON, tensor_bytes(reply)) if text else (SAFETENSORS, 0)
    frame = b"".join(await negotiation.pieces_of(reply, form, encoding, size))
    return frame.decode() if text else frame


async def _refuse(error: AttentionError) -> WireModel:
    raise error

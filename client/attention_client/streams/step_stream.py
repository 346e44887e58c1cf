"""``StepStream`` and ``AsyncStepStream``: steps of sessions as messages of one WebSocket connection."""

import asyncio
import ssl
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Self, Unpack, cast

from websockets.exceptions import ConnectionClosed, WebSocketException

from attention_client.arguments import ForwardFields, StepLike
from attention_client.array_likes import TensorLike
from attention_client.calls.base import Call, CallOptions, call
from attention_client.calls.method import Awaited, Blocking, Calls, WayT, method
from attention_client.connection_settings import StreamSettings
from attention_client.errors import ConnectionFailed, DeadlineExceeded, UnexpectedReply
from attention_client.streams.web_sockets import connection_arguments, refused
from attention_contract import operations
from attention_contract.base import assembled
from attention_contract.errors import AttentionError, BodyTooLarge, InvalidRequest, Unreadable, from_problem
from attention_contract.frames import MAX_FRAME_BYTES, reply_from_frame, to_frame
from attention_contract.schemas.attention import Tap
from attention_contract.schemas.sessions import (
    SessionStep,
    StepProblem,
    StepReply,
    StepRequest,
    StepsReply,
    StepsRequest,
)

if TYPE_CHECKING:
    import websockets.asyncio.client as awaited
    import websockets.sync.client as blocking

PATH: Final = "/v1/sessions/stream"
_TOO_BIG: Final = 1009
StepMessage = SessionStep | StepsRequest
Answer = StepReply | StepsReply
Reply = Answer | StepProblem


class StepCalls(Calls[WayT]):
    """Steps of sessions, by their ids."""

    @method
    def step(
        self, session: str, query: TensorLike, key: TensorLike | None = None, value: TensorLike | None = None, *,
        at: int | None = None, step: str | None = None,
        return_: Sequence[Tap] = ("output",), average_heads: bool = False, return_state: bool = False,
        report_error: bool = False, **options: Unpack[ForwardFields],
    ) -> Call[StepReply]:  # fmt: skip
        """Append tokens to a session and return the reply, as ``client.sessions.step`` does."""
        arguments = locals()
        return call(operations.step_session, {"id": arguments.pop("session"), **arguments})

    @method
    def step_many(self, steps: Sequence[StepLike], **options: Unpack[CallOptions]) -> Call[StepsReply]:
        """Step many sessions at once and return all results, as ``client.sessions.step_many`` does."""
        return call(operations.step_sessions, locals())


class StepStream(StepCalls[Blocking]):
    """A connection for steps. Threads may share it; each step waits for its reply.

    A broken connection is opened again by the next step. Raises ConnectionFailed if it breaks while a step waits, and
    whatever ``client.sessions.step`` raises.
    """

    def __init__(self, settings: StreamSettings, context: ssl.SSLContext | None = None) -> None:
        self._settings = settings
        self._ssl = context
        self._connection: blocking.ClientConnection | None = None
        self._opened = ExitStack()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connection."""
        self._connection = None
        self._opened.close()

    def __enter__(self) -> Self:
        self._connected()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, call: Call[Any]) -> Any:
        """Send the call of a step, or of many, and return its reply."""
        timeout = self._settings.policy.changed(call.options).timeout
        frame = _written(_message_of(call), self._settings)
        with self._lock:
            connection = self._connected()
            try:
                connection.send(frame)
                received = connection.recv(timeout)
            except TimeoutError:
                self.close()  # its next message would be this reply
                raise _late(timeout) from None
            except ConnectionClosed as fault:
                self.close()
                raise _broken(fault, self._settings) from fault
        return _checked(_read(received))

    def _connected(self) -> "blocking.ClientConnection":
        if self._connection is None:
            from websockets.sync.client import connect  # noqa: PLC0415 - few calls need it

            try:
                self._connection = self._opened.enter_context(
                    connect(**connection_arguments(self._settings, PATH, self._ssl))
                )
            except (OSError, WebSocketException) as fault:
                raise refused(fault, self._settings) from fault
        return self._connection


class AsyncStepStream(StepCalls[Awaited]):
    """A connection for steps. Tasks of one event loop may share it, and their steps wait side by side.

    A broken connection is opened again by the next step. Raises what ``StepStream`` raises. It needs asyncio.
    """

    _awaits = True

    def __init__(self, settings: StreamSettings, context: ssl.SSLContext | None = None) -> None:
        self._settings = settings
        self._ssl = context
        self._link: _Link | None = None
        self._lock = asyncio.Lock()

    async def close(self) -> None:
        """Close the connection."""
        link, self._link = self._link, None
        if link is not None:
            await link.connection.close()
            await link.reader

    async def __aenter__(self) -> Self:
        await self._connected()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def send(self, call: Call[Any]) -> Any:
        """Send the call of a step, or of many, and return its reply."""
        timeout = self._settings.policy.changed(call.options).timeout
        request = _message_of(call)
        frame = _written(request, self._settings)
        session = request.session if isinstance(request, SessionStep) else request.steps[0].session
        try:
            async with asyncio.timeout(timeout):
                link = await self._connected()
                received = link.expect(session)
                await link.connection.send(frame)
                return _checked(await received)
        except TimeoutError:
            raise _late(timeout) from None
        except ConnectionClosed as fault:
            raise _broken(fault, self._settings) from fault

    async def _connected(self) -> "_Link":
        async with self._lock:
            if self._link is None or self._link.reader.done():
                from websockets.asyncio.client import connect  # noqa: PLC0415 - few calls need it

                try:
                    connection = await connect(**connection_arguments(self._settings, PATH, self._ssl))
                except (OSError, WebSocketException) as fault:
                    raise refused(fault, self._settings) from fault
                self._link = _Link(connection)
            return self._link


class _Link:
    """An open connection and the replies that wait on it."""

    def __init__(self, connection: "awaited.ClientConnection") -> None:
        self.connection = connection
        self._waiting: dict[str, deque[asyncio.Future[Reply]]] = {}
        """The replies of each session that have not come, in the order in which they will."""
        self.reader = asyncio.create_task(self._receive())

    def expect(self, session: str) -> "asyncio.Future[Reply]":
        """Return the future of the next reply about a session."""
        made: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(session, deque()).append(made)
        return made

    async def _receive(self) -> None:
        """Hand every reply to the one who waits for it, until the connection ends."""
        try:
            async for frame in self.connection:
                self._deliver(_read(frame))
            fault: Exception = ConnectionClosed(self.connection.protocol.close_rcvd, None, None)
        except (ConnectionClosed, AttentionError) as broken:
            fault = broken
        await self.connection.close()
        for waiting in (waiting for queue in self._waiting.values() for waiting in queue if not waiting.done()):
            waiting.set_exception(fault)

    def _deliver(self, reply: Reply) -> None:
        session = reply.steps[0].session if isinstance(reply, StepsReply) else reply.session
        if session not in self._waiting:  # a message that the server could not read: it is about the oldest
            session = next(iter(self._waiting), None)
        if session is None:
            return
        queue = self._waiting[session]
        first = queue.popleft()
        if not queue:
            del self._waiting[session]
        if not first.done():
            first.set_result(reply)


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _message_of(call: Call[Any]) -> StepMessage:
    """Make the message of a call: a step of a session, or steps of many."""
    request = cast("StepRequest | StepsRequest", call.request)
    if isinstance(request, StepsRequest):
        return request
    values = {**request.__dict__, "session": call.path["id"]}
    return assembled(SessionStep, values, request.model_fields_set | {"session"})


def _written(request: StepMessage, settings: StreamSettings) -> str | bytes:
    """Write the message of a request. Raises BodyTooLarge for one that the server would not read."""
    text = settings.policy.media_type == "json"
    if text:  # keeps the dtypes of the reply
        request = request.model_copy(update={"encoding": "base64"})
    frame = to_frame(request, text=text, entry="request", encoding="base64")
    if len(frame) > MAX_FRAME_BYTES:
        raise BodyTooLarge(
            f"the message has {len(frame)} bytes; a stream takes up to {MAX_FRAME_BYTES}. Send it as a request",
            limit_bytes=MAX_FRAME_BYTES,
            needed_bytes=len(frame),
        )
    return frame


def _read(frame: str | bytes) -> Reply:
    """Read a message. Its tensors are writable views of a copy."""
    try:
        return reply_from_frame(frame if isinstance(frame, str) else bytearray(frame))
    except (Unreadable, InvalidRequest) as fault:
        raise UnexpectedReply(f"the message does not read as the reply to a step: {fault.detail}") from fault


def _checked(reply: Reply) -> Answer:
    """Return a reply, or raise the error that it is."""
    if isinstance(reply, StepProblem):
        raise from_problem(reply.status, reply.model_dump(exclude_none=True))
    return reply


# ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _broken(fault: ConnectionClosed, settings: StreamSettings) -> AttentionError:
    """Return the error of a connection that ended while a step waited."""
    if fault.rcvd is not None and fault.rcvd.code == _TOO_BIG:
        return BodyTooLarge("the message is larger than the server reads on a stream; send it as a request")
    return ConnectionFailed(f"the stream to {settings.url} broke: {fault}", sent=True)


def _late(timeout: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(f"the reply to a step did not come within {timeout} s", timeout=timeout)

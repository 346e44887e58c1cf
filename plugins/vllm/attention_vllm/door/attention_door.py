"""The field ``attention`` below ``vllm serve``: a middleware of its API, named by ``--middleware``.

A request without the field passes untouched. Of one with it, the door checks the field, sends it on in ``vllm_xargs``,
and adds to each token of vLLM's reply the attention that a worker has sent. The reply then has the form of
attention-service. What cannot be answered ends in an error that names the field, and its generation is ended.
"""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, Final, Protocol

from attention_contract.errors import AttentionError, InternalError
from attention_contract.json_writing import to_json
from attention_vllm.door.forward_replies import ForwardRoute
from attention_vllm.door.openai_replies import AttentionRoute, Tokenizer
from attention_vllm.door.result_inbox import AwaitedResults, ResultInbox

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
_log = logging.getLogger("vllm.attention_vllm")


class ReplyWriter(Protocol):
    """Writes the replies to one request."""

    async def write(self, reply: dict[str, Any]) -> bytes:
        """Return a reply of vLLM's, or a chunk, with what was asked. Raises AttentionError."""


class Route(Protocol):
    """A request that the door answers by one of vLLM's."""

    def scope(self, scope: Scope) -> Scope:
        """Return the scope with vLLM's path."""

    def asks(self, body: bytes, media_type: str, /) -> dict[str, Any] | None:
        """Return a request of which something is to be told; None for one that vLLM answers alone.

        Raises AttentionError.
        """

    def prepare(
        self, given: dict[str, Any], awaited: AwaitedResults, reply_to: str, tokenizer: Tokenizer, model: str
    ) -> tuple[dict[str, Any], ReplyWriter]:
        """Return vLLM's request, and the writer of its replies. ``model``: that of the path. Raises AttentionError."""


ROUTES: Final[tuple[tuple[re.Pattern[str], Route], ...]] = (
    (re.compile("/v1/(chat/)?completions"), AttentionRoute()),
    (re.compile("/v1/models/(?P<model>.+)/forward"), ForwardRoute()),
)
"""The paths, and the route of each."""


class AttentionDoor:
    """An ASGI middleware."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._inbox = ResultInbox()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                await self._inbox.close()
            return
        if scope["type"] == "http" and scope["method"] == "POST":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            for pattern, route in ROUTES:
                if (named := pattern.fullmatch(path)) is not None:
                    model = named.groupdict().get("model", "")
                    await _Exchange(route, model, self._inbox, scope, receive, send).run(self._app)
                    return
        await self._app(scope, receive, send)


class _Exchange:
    """One request and vLLM's response to it.

    The body is read when vLLM asks for it, so after vLLM has checked the key of the caller.
    """

    def __init__(
        self, route: Route, model: str, inbox: ResultInbox, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._route, self._model, self._inbox = route, model, inbox
        self._scope, self._receive, self._send = scope, receive, send
        self._read = False
        self._awaited: AwaitedResults | None = None
        self._writer: ReplyWriter | None = None
        """None until a request was read that asks, and for others: the response passes as it is."""
        self._watching: asyncio.Future[None] | None = None
        self._start: Message | None = None
        """The head of the response, held back until the first token is told of."""
        self._held = bytearray()
        self._streams = False
        self._passes = False
        """True for an error of vLLM's own."""
        self._begun = False
        self._failed = False
        self._over = asyncio.Event()

    async def run(self, app: App) -> None:
        """Let vLLM answer. If the ask is refused meanwhile, say so, and tell vLLM that the caller has gone."""
        try:
            await app(self._route.scope(self._scope), self._received, self._sent)
        except Exception as fault:
            if not self._failed:
                raise
            _log.debug("after an error was sent: %r", fault)
        finally:
            self._over.set()
            if self._watching is not None:
                self._watching.cancel()
                with suppress(asyncio.CancelledError):
                    await self._watching
            if self._awaited is not None:
                self._inbox.forget(self._awaited)

    async def _received(self) -> Message:
        """Receive the body as vLLM is to read it, then what else comes."""
        if not self._read:
            self._read = True
            body = await _body(self._receive)
            if body is None:
                return {"type": "http.disconnect"}
            try:
                body = await self._prepared(body)
            except AttentionError as fault:
                await self._fail(fault)
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": body, "more_body": False}
        if self._writer is None:
            return await self._receive()
        reading, over = asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait({reading, over}, return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else {"type": "http.disconnect"}
        finally:
            over.cancel()
            if not reading.done():
                reading.cancel()

    async def _prepared(self, body: bytes) -> bytes:
        """Return vLLM's request in place of one that asks. Raises AttentionError."""
        media_type = dict(self._scope["headers"]).get(b"content-type", b"").decode("latin-1")
        given = self._route.asks(body, media_type.partition(";")[0].strip().lower())
        if given is None:
            return body
        self._awaited = self._inbox.expect()
        await self._inbox.open()
        tokenizer, reply_to = _tokenizer(self._scope), self._inbox.name
        request, self._writer = self._route.prepare(given, self._awaited, reply_to, tokenizer, self._model)
        self._watching = asyncio.ensure_future(self._watch(self._awaited))
        return json.dumps(request).encode()

    async def _watch(self, awaited: AwaitedResults) -> None:
        """End the response if a worker refuses."""
        fault = await awaited.refusal()
        if not self._over.is_set():
            await self._fail(fault)

    async def _sent(self, message: Message) -> None:
        """Take a message of vLLM's response."""
        if self._failed or (self._over.is_set() and self._writer is not None):
            return
        if self._writer is None:
            await self._send(message)
            return
        try:
            if message["type"] == "http.response.start":
                self._head(message)
                if self._passes:
                    await self._send(message)
            elif message["type"] == "http.response.body":
                await self._part(message, self._writer)
        except AttentionError as fault:
            await self._fail(fault)
        except Exception as fault:
            _log.exception("attention of a reply")
            await self._fail(InternalError(f"{type(fault).__name__}: {fault}"))

    def _head(self, message: Message) -> None:
        headers = {name.lower(): value for name, value in message.get("headers", ())}
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip()
        self._streams = kind == b"text/event-stream"
        self._passes = message["status"] != 200 or (not self._streams and kind != b"application/json")
        kept = [header for header in message.get("headers", ()) if header[0].lower() != b"content-length"]
        self._start = message if self._passes else {**message, "headers": kept}

    async def _part(self, message: Message, writer: ReplyWriter) -> None:
        """Take a part of the body."""
        if self._passes:
            await self._send(message)
            return
        self._held += message.get("body", b"")
        more = message.get("more_body", False)
        if self._streams:
            await self._events(writer, more=more)
        elif not more:
            await self._out(await writer.write(json.loads(self._held)), more=False)
        if not more:
            self._over.set()

    async def _events(self, writer: ReplyWriter, *, more: bool) -> None:
        """Send the events that are whole."""
        *events, rest = bytes(self._held).split(b"\n\n")
        self._held = bytearray(rest)
        for event in events:
            if event.startswith(b"data: {") and "choices" in (chunk := json.loads(event[len(b"data: ") :])):
                event = b"data: " + await writer.write(chunk)  # noqa: PLW2901 - the same event, with more in it
            await self._out(event + b"\n\n", more=True)
        if not more:
            await self._out(bytes(self._held), more=False)

    async def _out(self, body: bytes, *, more: bool) -> None:
        if self._failed:
            return
        if not self._begun:
            self._begun = True
            await self._send(self._start or {})
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _fail(self, fault: AttentionError) -> None:
        """End the response by an error."""
        if self._failed:
            return
        self._failed = True
        self._over.set()
        if not self._begun:
            self._begun = True
            await _send_error(self._send, fault)
        else:
            event = b"data: " + to_json(_error(fault)) + b"\n\n"
            await self._send({"type": "http.response.body", "body": event, "more_body": False})


async def _body(receive: Receive) -> bytes | None:
    """Return the whole body; None of a caller that has gone."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


def _tokenizer(scope: Scope) -> Tokenizer:
    """Return vLLM's tokenizer; None without one."""
    client = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
    return getattr(client, "tokenizer", None)


def _error(fault: AttentionError) -> dict[str, Any]:
    """The object of OpenAI's API that describes an error."""
    kind = "invalid_request_error" if fault.status < 500 else "server_error"
    return {"error": {"message": fault.detail, "type": kind, "param": fault.param, "code": fault.code}}


async def _send_error(send: Send, fault: AttentionError) -> None:
    body = to_json(_error(fault))
    status = 400 if fault.status == 422 else fault.status  # as OpenAI's API has it
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})

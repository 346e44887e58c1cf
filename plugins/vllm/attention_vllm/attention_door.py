"""The field ``attention`` below ``vllm serve``: a middleware of its API, named by ``--middleware``.

A request without the field passes untouched. Of one with it, the door checks the field, sends it on in ``vllm_xargs``,
and adds to each token of vLLM's reply the attention that a worker has sent. The reply then has the form of
attention-service. What cannot be answered ends in an error that names the field, and its generation is ended.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, Final

from attention_contract.errors import AttentionError, InternalError, InvalidRequest
from attention_contract.json_writing import to_json
from attention_contract.schemas.openai import AttentionOfTokens
from attention_contract.validation import validate
from attention_vllm.openai_replies import PreparedRequest, ReplyWriter
from attention_vllm.result_inbox import AwaitedResults, ResultInbox

PATHS: Final = ("/v1/completions", "/v1/chat/completions")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
_log = logging.getLogger("vllm.attention_vllm")


class AttentionDoor:
    """An ASGI middleware."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._inbox = ResultInbox()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                await self._inbox.close()
            return
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(PATHS):
            await self._app(scope, receive, send)
            return
        body = await _body(receive)
        given = _asking(body)
        if given is None:
            await self._app(scope, _repeated(body, receive), send)
            return
        awaited = self._inbox.expect()
        try:
            await self._inbox.open()
            prepared = PreparedRequest(given, _validated(given), awaited.id, self._inbox.name)
            sent = to_json_with_nulls(prepared.body)
            answer = _Answer(send, awaited, ReplyWriter(awaited.take, _namer(scope)))
            await answer.run(self._app, _of_length(scope, len(sent)), sent, receive)
        except AttentionError as fault:
            await _send_error(send, fault)
        finally:
            self._inbox.forget(awaited)


class _Answer:
    """vLLM's response to one request on its way out."""

    def __init__(self, send: Send, awaited: AwaitedResults, writer: ReplyWriter) -> None:
        self._send, self._awaited, self._writer = send, awaited, writer
        self._start: Message | None = None
        """The head of the response, held back until the first token is told of."""
        self._held = bytearray()
        self._streams = False
        self._passes = False
        """True for an error of vLLM's own."""
        self._begun = False
        self._over = asyncio.Event()

    async def run(self, app: App, scope: MutableMapping[str, Any], body: bytes, receive: Receive) -> None:
        """Let vLLM answer. If the ask is refused meanwhile, say so, and tell vLLM that the caller has gone."""
        repeated = _repeated(body, receive)

        async def received() -> Message:
            reading, over = asyncio.ensure_future(repeated()), asyncio.ensure_future(self._over.wait())
            try:
                await asyncio.wait({reading, over}, return_when=asyncio.FIRST_COMPLETED)
                return reading.result() if reading.done() else {"type": "http.disconnect"}
            finally:
                over.cancel()
                if not reading.done():
                    reading.cancel()

        serving = asyncio.ensure_future(app(scope, received, self._pass))
        refusal = asyncio.ensure_future(self._awaited.refusal())
        try:
            await asyncio.wait({serving, refusal}, return_when=asyncio.FIRST_COMPLETED)
            if refusal.done() and not self._over.is_set():
                await self._fail(refusal.result())
            with suppress(asyncio.CancelledError):
                await serving
        finally:
            refusal.cancel()
            self._over.set()
            if not serving.done():
                serving.cancel()

    async def _pass(self, message: Message) -> None:
        """Take a message of vLLM's response."""
        if self._over.is_set():
            return
        try:
            if message["type"] == "http.response.start":
                self._head(message)
                if self._passes:
                    await self._send(message)
            elif message["type"] == "http.response.body":
                await self._part(message)
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

    async def _part(self, message: Message) -> None:
        if self._passes:
            await self._send(message)
            return
        self._held += message.get("body", b"")
        more = message.get("more_body", False)
        if self._streams:
            await self._events(more=more)
        elif not more:
            whole = await self._writer.write(json.loads(self._held))
            await self._out(whole, more=False)
        if not more:
            self._over.set()

    async def _events(self, *, more: bool) -> None:
        """Send the events that are whole."""
        *events, rest = bytes(self._held).split(b"\n\n")
        self._held = bytearray(rest)
        for event in events:
            if event.startswith(b"data: {") and "choices" in (chunk := json.loads(event[len(b"data: ") :])):
                event = b"data: " + await self._writer.write(chunk)  # noqa: PLW2901 - the same event, with more in it
            await self._out(event + b"\n\n", more=True)
        if not more:
            await self._out(bytes(self._held), more=False)

    async def _out(self, body: bytes, *, more: bool) -> None:
        if not self._begun:
            self._begun = True
            await self._send(self._start or {})
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _fail(self, fault: AttentionError) -> None:
        """End the response by an error."""
        self._over.set()
        if not self._begun:
            self._begun = True
            await _send_error(self._send, fault)
        else:
            event = b"data: " + to_json(_error(fault)) + b"\n\n"
            await self._send({"type": "http.response.body", "body": event, "more_body": False})


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body", False):
            return bytes(body)


def _asking(body: bytes) -> dict[str, Any] | None:
    """The request of a body that has the field; None for another, which vLLM reads itself."""
    if b'"attention"' not in body:
        return None
    try:
        given = json.loads(body)
    except ValueError:
        return None
    return given if isinstance(given, dict) and given.get("attention") is not None else None


def _validated(given: dict[str, Any]) -> AttentionOfTokens:
    try:
        return validate(AttentionOfTokens, given["attention"], by_name=False)
    except InvalidRequest as fault:
        param = "attention" if fault.param is None else f"attention.{fault.param}"
        detail = fault.detail.removeprefix(f"{fault.param}: ")
        raise type(fault).at(param, detail) from None


def to_json_with_nulls(body: dict[str, Any]) -> bytes:
    """A request as vLLM is to read it: null fields stay."""
    return json.dumps(body).encode()


def _repeated(body: bytes, receive: Receive) -> Receive:
    """Receive a body that was read, then what else comes."""
    given = False

    async def received() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return received


def _of_length(scope: MutableMapping[str, Any], length: int) -> MutableMapping[str, Any]:
    """The scope of a request whose body has another length."""
    headers = [header for header in scope["headers"] if header[0].lower() != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def _namer(scope: MutableMapping[str, Any]) -> Callable[[Sequence[int]], list[str]]:
    """Return the texts of tokens by vLLM's tokenizer; their ids without one."""
    client = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
    tokenizer = getattr(client, "tokenizer", None)

    def names(ids: Sequence[int]) -> list[str]:
        return [str(token) if tokenizer is None else tokenizer.decode([token]) for token in ids]

    return names


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

"""The handlers of OpenAI's operations. The process of the model writes their objects; here they are passed on."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Final

import orjson
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from attention_contract.errors import AttentionError, Cancelled
from attention_contract.schemas.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from attention_contract.schemas.transcriptions import TranscriptionRequest
from attention_contract.wire import EVENTS, JSON, to_json
from attention_service.api.doors.openai.openai_errors import openai_error
from attention_service.api.handlers import Call, Handler, Reply, request_id, unless_gone


async def generate(call: Call, body: ChatCompletionRequest | CompletionRequest) -> Response:
    """Generate: one object, or a stream of them."""
    operation = "chat" if isinstance(body, ChatCompletionRequest) else "complete"
    objects = call.engine.models.stream(body.model, operation, body, call.deadline)
    if body.stream:
        first = await anext(objects)  # a fault before it has a status of its own
        return EventStream(first, objects, call.deadline)
    async with aclosing(objects):
        return Reply([each async for each in objects], JSON, 200, {})


async def embed(call: Call, body: EmbeddingRequest) -> Response:
    """A vector for each text."""
    reply = await call.engine.models.ask(body.model, "embed", body, JSON)
    return Reply(reply.pieces, reply.media_type, 200, {})


async def transcribe(call: Call, body: TranscriptionRequest) -> Response:
    """The text of a sound: one object, a stream of pieces, or the text alone."""
    objects = call.engine.models.stream(body.model, "transcribe", body, call.deadline)
    if body.stream:
        first = await anext(objects)
        return EventStream(first, objects, call.deadline)
    async with aclosing(objects):
        found = [each async for each in objects]
    if body.response_format == "text":
        return PlainTextResponse(orjson.loads(found[-1])["text"])
    return Reply(found, JSON, 200, {})


OPENAI_HANDLERS: Final[Mapping[str, Handler]] = {
    "create_chat_completion": generate,
    "create_completion": generate,
    "create_embedding": embed,
    "create_transcription": transcribe,
}
"""The handler of each operation of OpenAI's API by its name."""
_HEADERS: Final = (
    (b"content-type", EVENTS.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect them
)


class EventStream(Response):
    """Sends objects as they come. A fault in between is the last of them."""

    background = None

    def __init__(self, first: memoryview, objects: AsyncGenerator[memoryview], deadline: float | None) -> None:
        """``first``, ``objects``: JSON text, one object a line."""
        self.status_code = 200
        self.raw_headers = [*_HEADERS]
        self._first, self._objects, self._deadline = first, objects, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head, then every object, unless the caller goes away."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with suppress(Cancelled):
            try:
                await unless_gone(receive, self._send(send), self._deadline)
            except Cancelled:
                raise
            except AttentionError as error:
                error.request_id = request_id.get()
                await _send_lines(send, to_json(openai_error(error)))
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _send(self, send: Send) -> None:
        async with aclosing(self._objects) as objects:
            await _send_lines(send, self._first)
            async for lines in objects:
                await _send_lines(send, lines)


async def _send_lines(send: Send, lines: bytes | memoryview) -> None:
    body = b"".join([b"data: %b\n\n" % line for line in bytes(lines).split(b"\n")])
    await send({"type": "http.response.body", "body": body, "more_body": True})

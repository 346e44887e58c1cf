"""The handlers of OpenAI's operations. The process of the model writes their objects; here they are passed on."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Final

import orjson
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from attention_contract.errors import AttentionError, Cancelled
from attention_contract.schemas.openai import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    EmbeddingRequest,
)
from attention_contract.schemas.openai_api.captions import captions
from attention_contract.schemas.openai_api.responses import ModelResponse, ResponseRequest
from attention_contract.schemas.openai_api.scoring import RerankRequest, ScoreRequest
from attention_contract.schemas.openai_api.tokenization import TokenizeRequest
from attention_contract.schemas.openai_api.transcriptions import Transcription, TranscriptionRequest
from attention_contract.wire import EVENTS, JSON, TABLES, from_body, to_json
from attention_service.api.doors.openai.openai_errors import openai_error
from attention_service.api.handlers import Handler, Reply, RequestContext, request_id, unless_gone

Question = EmbeddingRequest | RerankRequest | ScoreRequest | TokenizeRequest
_QUESTIONS: Final = {
    EmbeddingRequest: "embed", RerankRequest: "rerank", ScoreRequest: "score", TokenizeRequest: "tokenize",
}  # fmt: skip
_OPERATIONS: Final = {ChatCompletionRequest: "chat", CompletionRequest: "complete", ResponseRequest: "respond"}
_WHOLE: Final[dict[type, type[ChatCompletion | Completion | ModelResponse]]] = {
    ChatCompletionRequest: ChatCompletion, CompletionRequest: Completion, ResponseRequest: ModelResponse,
}  # fmt: skip


async def generate(
    call: RequestContext, body: ChatCompletionRequest | CompletionRequest | ResponseRequest
) -> Response | ChatCompletion | Completion | ModelResponse:
    """Generate: one object, or a stream of them. An object is read here only to become a table."""
    objects = call.engine.models.stream(body.model, _OPERATIONS[type(body)], body, call.deadline)
    if body.stream:
        first = await anext(objects)  # a fault before it has a status of its own
        return EventStream(first, objects, call.deadline)
    async with aclosing(objects):
        pieces = [piece async for piece in objects]
    if call.media_type in TABLES:
        return from_body(_WHOLE[type(body)], b"".join(pieces), JSON, "reply")
    return Reply(pieces, JSON, 200, {"Vary": "Accept"})


async def ask(call: RequestContext, body: Question) -> Response:
    """A vector for each text, the scores of pairs of texts, or the tokens of a text."""
    reply = await call.engine.models.ask(body.model, _QUESTIONS[type(body)], body, JSON)
    return Reply(reply.pieces, reply.media_type, 200, {})


async def transcribe(call: RequestContext, body: TranscriptionRequest) -> Response | Transcription:
    """The text of a sound: one object, which may become a table, a stream of pieces, the text alone, or captions."""
    objects = call.engine.models.stream(body.model, "transcribe", body, call.deadline)
    if body.stream:
        first = await anext(objects)
        return EventStream(first, objects, call.deadline)
    async with aclosing(objects):
        pieces = [piece async for piece in objects]
    if call.media_type in TABLES:
        return from_body(Transcription, b"".join(pieces), JSON, "reply")
    form = body.response_format
    if form == "text":
        return PlainTextResponse(orjson.loads(pieces[-1])["text"])
    if form == "srt" or form == "vtt":  # noqa: PLR1714 -- mypy narrows no tuple
        cues = [(one["start"], one["end"], one["text"]) for one in orjson.loads(pieces[-1])["segments"]]
        return PlainTextResponse(captions(cues, form))
    return Reply(pieces, JSON, 200, {"Vary": "Accept"})


OPENAI_HANDLERS: Final[Mapping[str, Handler]] = {
    "create_chat_completion": generate,
    "create_completion": generate,
    "create_response": generate,
    "create_embedding": ask,
    "rerank": ask,
    "score": ask,
    "tokenize": ask,
    "create_transcription": transcribe,
}
"""The handler of each operation of OpenAI's API by its name."""
_TYPE: Final = b'{"type":"'
"""The beginning of an event with a type."""
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
        self._typed = bytes(first[: len(_TYPE)]) == _TYPE
        """True if its objects are events with types, which their lines then name too."""
        self._sent = 0
        """The number of objects that were sent."""

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
                fault = openai_error(error)
                if self._typed:
                    fault = {"type": "error", "sequence_number": self._sent} | fault
                await self._send_lines(send, to_json(fault))
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _send(self, send: Send) -> None:
        async with aclosing(self._objects) as objects:
            await self._send_lines(send, self._first)
            async for lines in objects:
                await self._send_lines(send, lines)

    async def _send_lines(self, send: Send, lines: bytes | memoryview) -> None:
        events = bytes(lines).split(b"\n")
        self._sent += len(events)
        body = b"".join([b"%bdata: %b\n\n" % (_named(event) if self._typed else b"", event) for event in events])
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _named(event: bytes) -> bytes:
    """The line that names the type of an event, which is its first field."""
    kind = event[len(_TYPE) :].partition(b'"')[0]
    return b"event: %b\n" % kind

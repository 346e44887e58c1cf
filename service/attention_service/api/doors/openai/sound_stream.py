"""``WS /v1/audio/transcriptions/stream``: the text of a sound while it comes."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, aclosing, suppress
from typing import Any, Final

import orjson
from starlette.types import Message, Receive, Scope, Send

from attention_contract.errors import AttentionError, InvalidRequest, Overloaded
from attention_contract.schemas.openai_api.sound_streams import (
    MAX_PIECE_S,
    MAX_STREAM_S,
    SoundStreamEnd,
    SoundStreamEvent,
    SoundStreamStart,
)
from attention_contract.schemas.openai_api.transcriptions import Transcription, TranscriptionRequest
from attention_contract.validation import validate
from attention_contract.wire import to_json
from attention_service.api.doors.openai.growing_text import SAMPLE_BYTES, GrowingText
from attention_service.api.doors.openai.openai_errors import openai_error
from attention_service.api.handlers import RequestContext, call_of, refusal, request_id, unexpected
from attention_service.runtime.callers import Caller, caller
from attention_service.runtime.request_timing import RequestTiming, timing

_OPEN: Final = 64
"""Streams that are open at a time."""
_OF_ONE: Final = 8
"""Open streams of one caller at a time."""
_SILENT_S: Final = 120.0
"""Seconds without a message after which a stream is closed."""
_MOST_DELAY_S: Final = 5.0
"""Seconds of new sound that a server waits for at most, whose model takes longer than the sound."""
_MOST_TEXT: Final = 2**17
"""Characters of a message as text."""
_NORMAL, _REFUSED = 1000, 1008


class SoundStreams:
    """The ASGI application, and the number of streams of each caller."""

    def __init__(
        self, counted: Callable[[Caller], AbstractContextManager[None]], log: Callable[[int, float], None],
        protocol: str,
    ) -> None:  # fmt: skip
        """Serve them.

        ``counted`` counts a request of a caller while it runs; ``log`` notes its status and seconds; ``protocol`` is
        the subprotocol that pages offer beside their key.
        """
        self._counted, self._log, self._protocol = counted, log, protocol
        self._open: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return the number of open streams."""
        return self._open.total()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one stream until either side ends it."""
        name = caller.get().name
        try:
            call = call_of(scope)
            call.engine.runner.check_ready()
            for count, limit, whose in ((len(self), _OPEN, ""), (self._open[name], _OF_ONE, " of yours")):
                if count >= limit:
                    raise Overloaded(f"{limit} streams of sound{whose} are open; try again later", limit=limit)
        except AttentionError as error:
            await refusal(error)(scope, receive, send)
            return
        spoken = self._protocol if self._protocol in scope.get("subprotocols", ()) else None
        self._open[name] += 1
        try:
            await receive()
            await send({"type": "websocket.accept", "subprotocol": spoken, "headers": []})
            await self._serve(call, receive, send)
        finally:
            self._open[name] -= 1
            self._open += Counter()  # forgets those without any

    async def _serve(self, call: RequestContext, receive: Receive, send: Send) -> None:
        code = _NORMAL
        try:
            await self._listen(call, receive, send)
        except AttentionError as error:
            code = _REFUSED
            error.request_id = request_id.get()
            await _send(send, {"type": "error"} | openai_error(error))
        except _LeftError:
            return
        except Exception as fault:  # of the server itself
            code = 1011
            await _send(send, {"type": "error"} | openai_error(unexpected("sound_stream", fault)))
        with suppress(OSError, RuntimeError):
            await send({"type": "websocket.close", "code": code, "reason": ""})

    async def _listen(self, call: RequestContext, receive: Receive, send: Send) -> None:
        """Take the pieces of a sound, and send its text. Raises what a transcription raises, and _LeftError."""
        start = _read(await _next(receive), SoundStreamStart)

        async def ask(request: TranscriptionRequest) -> Transcription:
            timing.set(RequestTiming())
            began, status = time.perf_counter(), 200
            try:
                with self._counted(caller.get()):
                    async with aclosing(call.engine.models.stream(request.model, "transcribe", request)) as objects:
                        pieces = [piece async for piece in objects]
            except AttentionError as error:
                status = error.status
                raise
            finally:
                self._log(status, time.perf_counter() - began)
            return validate(Transcription, orjson.loads(pieces[-1]))

        text, took = GrowingText(start, ask), 0.0
        while True:
            message = await _next(receive)
            samples = message.get("bytes")
            if samples is None:
                _read(message, SoundStreamEnd)
                await _tell(send, await text.hear(last=True), text)
                event = SoundStreamEvent(type="transcript.text.done", text=text.text, heard_s=text.heard_s)
                await _send(send, event)
                return
            _check(samples, text)
            text.add(samples)
            if text.is_due(took):
                began = time.monotonic()
                await _tell(send, await text.hear(), text)
                took = min(time.monotonic() - began, _MOST_DELAY_S)


class _LeftError(Exception):
    """The caller is gone, or said nothing for long."""


async def _next(receive: Receive) -> Message:
    try:
        async with asyncio.timeout(_SILENT_S):
            message = await receive()
    except TimeoutError:
        raise InvalidRequest.at("end", f"no message came for {_SILENT_S:g} s; the stream is closed") from None
    if message["type"] != "websocket.receive":
        raise _LeftError
    return message


def _read(message: Message, kind: Any) -> Any:
    """A message as text. Raises InvalidRequest."""
    text = message.get("text")
    if text is None or len(text) > _MOST_TEXT:
        raise InvalidRequest.at("model", "expected the settings of the stream as JSON text before any samples")
    try:
        fields = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise InvalidRequest.at("request", "the message is no valid JSON") from None
    return validate(kind, fields)


def _check(samples: bytes, text: GrowingText) -> None:
    """Raise InvalidRequest for a piece that is no whole number of samples, or too long."""
    if not samples or len(samples) % SAMPLE_BYTES:
        raise InvalidRequest.at("samples", f"expected signed 16-bit samples; got {len(samples)} bytes")
    seconds = text.seconds_of(samples)
    for actual, limit, whose in (
        (seconds, MAX_PIECE_S, "a message"), (text.heard_s + seconds, MAX_STREAM_S, "a stream"),
    ):  # fmt: skip
        if actual > limit:
            raise InvalidRequest.at("samples", f"{whose} has at most {limit} s of sound; got {actual:.1f}", limit=limit)


async def _tell(send: Send, delta: str, text: GrowingText) -> None:
    if delta:
        await _send(send, SoundStreamEvent(type="transcript.text.delta", delta=delta, heard_s=text.heard_s))


async def _send(send: Send, event: Any) -> None:
    with suppress(OSError, RuntimeError):  # the connection is gone, or closing
        await send({"type": "websocket.send", "text": to_json(event).decode()})

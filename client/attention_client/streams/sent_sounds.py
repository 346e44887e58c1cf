"""The text of a sound while it comes: ``WS /v1/audio/transcriptions/stream``, for a thread and for asyncio."""

import asyncio
import ssl
import threading
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator
from contextlib import aclosing, suppress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from websockets.exceptions import ConnectionClosed, WebSocketException

from attention_client.array_likes import TensorLike, plain
from attention_client.connection_settings import StreamSettings
from attention_client.errors import ConnectionFailed, UnexpectedReply
from attention_client.streams.web_sockets import connection_arguments, refused
from attention_contract.errors import InvalidRequest, Unreadable, from_problem
from attention_contract.json_reading import from_json
from attention_contract.schemas.openai_api.sound_streams import (
    MAX_PIECE_S,
    SOUND_STREAM_PATH,
    SoundStreamEnd,
    SoundStreamEvent,
    SoundStreamStart,
)
from attention_contract.validation import validate
from attention_contract.wire import to_json

SoundPiece = bytes | TensorLike
"""Samples of one channel: signed 16-bit ones, little-endian, or numbers from −1 to 1."""
_END: Final = to_json(SoundStreamEnd(end=True)).decode()
_FULL: Final = 32_767
"""The largest sample."""


def heard(
    settings: StreamSettings, start: SoundStreamStart, pieces: Iterable[SoundPiece], context: ssl.SSLContext | None
) -> Iterator[SoundStreamEvent]:
    """Yield the text of a sound whose pieces another thread sends as they come. Raises what a transcription raises."""
    from websockets.sync.client import connect  # noqa: PLC0415 - few calls need it

    try:
        opened = connect(**connection_arguments(settings, SOUND_STREAM_PATH, context))
    except (OSError, WebSocketException) as fault:
        raise refused(fault, settings) from fault
    faults: list[BaseException] = []

    def talk() -> None:
        try:
            for piece in pieces:
                for message in _messages(piece, start.rate):
                    opened.send(message)
            opened.send(_END)
        except ConnectionClosed:
            return  # the reader says why
        except BaseException as fault:  # of the caller's own microphone
            faults.append(fault)
            opened.close()

    with opened:
        opened.send(to_json(start).decode())
        threading.Thread(target=talk, daemon=True, name="attention-sound").start()
        try:
            for message in opened:
                yield (event := _event(message))
                if event.type == "transcript.text.done":
                    return
        except ConnectionClosed as fault:
            raise _broken(settings, fault) from fault
    raise faults[0] if faults else _broken(settings)


async def heard_async(
    settings: StreamSettings, start: SoundStreamStart, pieces: AsyncIterable[SoundPiece] | Iterable[SoundPiece],
    context: ssl.SSLContext | None,
) -> AsyncIterator[SoundStreamEvent]:  # fmt: skip
    """Yield the text of a sound whose pieces another task sends as they come. Raises what a transcription raises."""
    from websockets.asyncio.client import connect  # noqa: PLC0415 - few calls need it

    try:
        opened = await connect(**connection_arguments(settings, SOUND_STREAM_PATH, context))
    except (OSError, WebSocketException) as fault:
        raise refused(fault, settings) from fault

    async def talk() -> None:
        try:
            async with aclosing(_awaited(pieces)) as coming:
                async for piece in coming:
                    for message in _messages(piece, start.rate):
                        await opened.send(message)
            await opened.send(_END)
        except ConnectionClosed:
            return
        except BaseException:
            await opened.close()
            raise

    async with opened:
        await opened.send(to_json(start).decode())
        talking = asyncio.create_task(talk())
        try:
            async for message in opened:
                yield (event := _event(message))
                if event.type == "transcript.text.done":
                    return
        except ConnectionClosed as fault:
            raise _broken(settings, fault) from fault
        finally:
            if not talking.done():
                talking.cancel()
            with suppress(asyncio.CancelledError):
                await talking
    raise _broken(settings)


async def _awaited(pieces: AsyncIterable[SoundPiece] | Iterable[SoundPiece]) -> AsyncGenerator[SoundPiece]:
    if isinstance(pieces, AsyncIterable):
        async for piece in pieces:
            yield piece
        return
    for piece in pieces:
        yield piece


def _messages(piece: SoundPiece, rate: int) -> Iterator[bytes]:
    """Write samples as messages that a server takes. Raises InvalidRequest."""
    samples = piece if isinstance(piece, bytes) else _samples(plain(piece))
    size = 2 * MAX_PIECE_S * rate
    for at in range(0, len(samples), size):
        yield samples[at : at + size]


def _samples(given: Any) -> bytes:
    values: NDArray[Any] = np.asarray(given)
    if values.ndim != 1 or values.dtype.kind not in "fi" or (values.dtype.kind == "i" and values.dtype != np.int16):
        problem = f"expected samples [n] of one channel, 16-bit or from −1 to 1; got {values.dtype} {[*values.shape]}"
        raise InvalidRequest.at("pieces", problem)
    if values.dtype == np.int16:
        return values.astype("<i2").tobytes()
    if not np.isfinite(values).all():
        raise InvalidRequest.at("pieces", "expected samples from −1 to 1; some are not finite")
    whole: NDArray[np.int16] = (np.clip(values, -1, 1) * _FULL).astype("<i2")
    return whole.tobytes()


def _event(message: str | bytes) -> SoundStreamEvent:
    """Read a message. Raises the error that it is."""
    try:
        document = from_json(message if isinstance(message, bytes) else message.encode())
    except Unreadable as fault:
        raise UnexpectedReply(f"a message of the stream does not read: {fault.detail}") from fault
    if isinstance(document, dict) and isinstance(error := document.get("error"), dict):
        raise from_problem(500, error | {"detail": error.get("message")})
    return validate(SoundStreamEvent, document)


def _broken(settings: StreamSettings, fault: ConnectionClosed | None = None) -> ConnectionFailed:
    why = "it ended before the text did" if fault is None else str(fault)
    return ConnectionFailed(f"the stream to {settings.url} broke: {why}", sent=True)

"""The text of a sound that comes piece by piece: each time the model hears on from the tokens that were accepted.

Nothing of it is kept by the model's process between two pieces: each is a request of its own.
"""

import struct
from base64 import b64encode
from collections.abc import Awaitable, Callable
from typing import Final

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.openai_api.sound_streams import SoundStreamStart
from attention_contract.schemas.openai_api.transcriptions import GrowingSound, Transcription, TranscriptionRequest
from attention_contract.schemas.prompts import AudioBytes

Ask = Callable[[TranscriptionRequest], Awaitable[Transcription]]
SAMPLE_BYTES: Final = 2
"""Bytes of a sample, of signed 16 bits."""
_LEAST_S: Final = 0.2
"""Seconds of a sound that every model takes."""


class GrowingText:
    """The text of one stream, in windows of what the model hears at a time."""

    def __init__(self, start: SoundStreamStart, ask: Ask) -> None:
        self._start, self._ask = start, ask
        self._samples = bytearray()
        """The samples of the window."""
        self._accepted: list[int] = []
        """The tokens of the window that were accepted, which stay."""
        self._text, self._before = "", ""
        """Their text, and that of the windows before."""
        self._reached = 0.0
        """The second of the window at which the last accepted token looked."""
        self.heard_s = 0.0
        """Seconds of the sound that came."""
        self._unheard = 0.0

    @property
    def text(self) -> str:
        """The text so far."""
        return " ".join(part for part in (self._before, self._text) if part)

    def seconds_of(self, samples: bytes | bytearray) -> float:
        """Return the length of a piece."""
        return len(samples) / SAMPLE_BYTES / self._start.rate

    def add(self, samples: bytes) -> None:
        """Take the next piece."""
        seconds = self.seconds_of(samples)
        self._samples += samples
        self.heard_s += seconds
        self._unheard += seconds

    def is_due(self, least_s: float) -> bool:
        """True if at least so many seconds came that the model has not heard."""
        return self._unheard >= max(least_s, self._start.every_s)

    async def hear(self, *, last: bool = False) -> str:
        """Have the model hear on. Returns what the text goes on with. ``last``: the sound has ended.

        Raises what a transcription raises.
        """
        before = self.text
        while len(self._samples) >= _LEAST_S * self._start.rate * SAMPLE_BYTES:
            try:
                reply = await self._ask(self._request(last=last))
            except InvalidRequest as fault:
                limit = fault.facts.get("limit")
                if fault.param not in {"file", "growing.accepted"} or not isinstance(limit, int | float):
                    raise
                if not await self._move(float(limit) if fault.param == "file" else None):
                    raise
                continue
            self._take(reply)
            break
        self._unheard = 0.0
        return self.text.removeprefix(before)

    def _take(self, reply: Transcription) -> None:
        self._text = reply.text
        self._accepted = reply.accepted if isinstance(reply.accepted, list) else []
        if isinstance(reply.reached, float):
            self._reached = reply.reached

    async def _move(self, most_s: float | None) -> bool:
        """Begin a new window where the last accepted token looked. Returns False if there is nowhere to go.

        ``most_s``: seconds that the model hears at a time. Where nothing was accepted, the window is half of it before
        the end of the sound.
        """
        length = self.seconds_of(self._samples)
        begin = self._reached if self._accepted else 0.0
        if most_s is not None and length - begin > most_s:
            begin = max(begin, length - most_s / 2)
        if begin <= 0:
            return False
        del self._samples[: SAMPLE_BYTES * round(begin * self._start.rate)]
        self._before, self._text = self.text, ""
        self._accepted, self._reached = [], 0.0
        return True

    def _request(self, *, last: bool) -> TranscriptionRequest:
        start = self._start
        growing = GrowingSound(accepted=self._accepted, frames=0 if last else start.frames)
        return TranscriptionRequest(
            model=start.model, file=AudioBytes(base64=b64encode(wave_of(self._samples, start.rate)).decode()),
            language=start.language, prompt=start.prompt, temperature=start.temperature,
            alignment_heads=start.alignment_heads, adapter=start.adapter, growing=growing,
        )  # fmt: skip


def wave_of(samples: bytes | bytearray, rate: int) -> bytes:
    """A WAV file of signed 16-bit samples of one channel."""
    head = struct.pack(
        "<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(samples), b"WAVE", b"fmt ", 16, 1, 1, rate, rate * SAMPLE_BYTES,
        SAMPLE_BYTES, 8 * SAMPLE_BYTES, b"data", len(samples),
    )  # fmt: skip
    return head + bytes(samples)

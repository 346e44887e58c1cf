"""The messages of ``WS /v1/audio/transcriptions/stream``: a sound that comes piece by piece, and its text.

The first message is a ``SoundStreamStart`` as text. Those behind it are binary, signed 16-bit samples of one channel,
little-endian, until the text ``{"end": true}``. Each answer is a ``SoundStreamEvent``, or an error in OpenAI's form.
"""

from typing import Annotated, Final, Literal

from pydantic import Field

from attention_contract.base import ABSENT, IfRequested, WireModel
from attention_contract.exact_types import Index
from attention_contract.schemas.prompts import MAX_TEXT

SOUND_STREAM_PATH: Final = "/v1/audio/transcriptions/stream"
MAX_PIECE_S: Final = 30
"""Seconds of sound in one message."""
MAX_STREAM_S: Final = 4 * 3600
"""Seconds of sound in one stream."""


class SoundStreamStart(WireModel):
    """The settings of a stream; those of a transcription have the same names there."""

    model: str = Field(min_length=1, max_length=512)
    rate: Annotated[int, Field(ge=8_000, le=48_000)] = 16_000
    """Samples a second."""
    frames: Annotated[int, Field(ge=1, le=4096)] = 25
    """The text stops before the first token whose alignment heads look most at one of the last frames of the sound."""
    every_s: Annotated[float, Field(ge=0.2, le=30, allow_inf_nan=False)] = 1.0
    """Seconds of new sound after which the model hears on."""
    language: str | None = Field(default=None, min_length=1, max_length=64)
    prompt: str | None = Field(default=None, min_length=1, max_length=MAX_TEXT)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    alignment_heads: Annotated[list[tuple[Index, Index]], Field(min_length=1, max_length=1024)] | None = None
    adapter: str | None = Field(default=None, min_length=1, max_length=512)


class SoundStreamEnd(WireModel):
    """The sound has ended."""

    end: Literal[True]


class SoundStreamEvent(WireModel):
    """A piece of the text, which stays, or all of it at the end."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: IfRequested[str] = ABSENT
    text: IfRequested[str] = ABSENT
    heard_s: float
    """Seconds of the sound that had come."""

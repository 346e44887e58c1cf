"""Requests and replies of OpenAI's API for the text of a sound, as its ``openai`` package writes and reads them.

Fields more than there: ``attention`` and ``alignment_heads``. Source: the types of ``openai`` 3.57.
"""

import struct
from base64 import b64encode
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, at_fault
from attention_contract.exact_types import Index
from attention_contract.schemas.openai import (
    AttentionOfTokens,
    GeneratedToken,
    OpenAIRan,
    OpenAIRequest,
    Refused,
    TokenLogprob,
)
from attention_contract.schemas.prompts import MAX_TEXT, AudioBytes


class TranscriptionRequest(OpenAIRequest):
    """Write down what is said in a sound: a form with a file, or JSON."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "chunking_strategy": ("auto",), "known_speaker_names": ([],), "known_speaker_references": ([],),
    }  # fmt: skip

    file: AudioBytes
    """The bytes of a WAV, FLAC, OGG or MP3 file: the file of a form, or ``{"base64": …}`` in JSON."""
    language: str | None = Field(default=None, min_length=1, max_length=64)
    """The language, as ``en`` or ``english``. Default: the one that the model hears."""
    prompt: str | None = Field(default=None, min_length=1, max_length=MAX_TEXT)
    """A text that comes before: names and a style to follow. Of some models that read texts with sounds, the
    instruction in place of the checkpoint's."""
    response_format: Literal["json", "text", "verbose_json"] | None = None
    """``json``, by default: an object with the text. ``text``: the text alone. ``verbose_json``: with language, length
    and the times of words."""
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    """Divides the logits before sampling. Default: 0, the most likely token each time."""
    timestamp_granularities: Listed[Literal["word"]] | None = Field(default=None, max_length=1)
    """The times in the reply in ``verbose_json``: those of words."""
    stream: bool | None = None
    """Send pieces of the text as server-sent events as soon as they are known."""
    include: Listed[Literal["logprobs"]] | None = Field(default=None, max_length=1)
    """``logprobs``: return the log-probability of each token."""
    attention: AttentionOfTokens | None = None
    """Return the attention of each token with the seconds that it looked at, and edit attention."""
    alignment_heads: Annotated[list[tuple[Index, Index]], Field(min_length=1, max_length=1024)] | None = None
    """Layer and head that times are taken from: of cross-attentions, or of the text's layers in a model that reads
    texts with sounds. Default: those of the checkpoint's generation_config.json, or all heads of the later half."""
    chunking_strategy: Refused = None
    known_speaker_names: Refused = None
    known_speaker_references: Refused = None

    @model_validator(mode="after")
    def _tells_times(self) -> "TranscriptionRequest":
        verbose = self.response_format == "verbose_json" and not self.stream
        if self.timestamp_granularities is not None and not verbose:
            raise at_fault("timestamp_granularities", "it goes with the response_format verbose_json, without stream")
        if self.alignment_heads is not None and not verbose and self.attention is None:
            raise at_fault("alignment_heads", "they go with verbose_json or attention, which tell times")
        return self


class HeardWord(WireModel):
    """A word and its time in the sound, in seconds."""

    word: str
    start: float
    end: float


class HeardDuration(WireModel):
    """The length of the sound."""

    type: Literal["duration"] = "duration"
    seconds: float


class Transcription(WireModel):
    """The text of a sound."""

    text: str
    logprobs: IfRequested[list[TokenLogprob]] = ABSENT
    task: IfRequested[Literal["transcribe"]] = ABSENT
    language: IfRequested[str | None] = ABSENT
    """In English, as ``german``. Null if neither the tokens nor the prompt name it."""
    duration: IfRequested[float] = ABSENT
    """Seconds of the sound."""
    words: IfRequested[list[HeardWord]] = ABSENT
    """With ``verbose_json``: found by dynamic time warping over the alignment heads."""
    usage: IfRequested[HeardDuration] = ABSENT
    ran: IfRequested[OpenAIRan] = ABSENT
    attention: IfRequested[list[GeneratedToken]] = ABSENT
    """The tokens, each with ``seconds`` and the attention that chose it."""


class TranscriptionEvent(WireModel):
    """A piece of a streamed text, or the whole of it at the end."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: IfRequested[str] = ABSENT
    text: IfRequested[str] = ABSENT
    logprobs: IfRequested[list[TokenLogprob]] = ABSENT
    attention: IfRequested[list[GeneratedToken]] = ABSENT
    ran: IfRequested[OpenAIRan] = ABSENT
    """In the last event."""


_SILENCE: Final = struct.pack(
    "<4sI4s4sIHHIIHH4sI80s", b"RIFF", 116, b"WAVE", b"fmt ", 16, 1, 1, 8000, 8000, 1, 8, b"data", 80, b"\x80" * 80
)
"""A WAV file of 10 milliseconds."""
EXAMPLE_SOUND: Final[dict[str, Any]] = {"model": "tiny", "file": {"base64": b64encode(_SILENCE).decode()}}

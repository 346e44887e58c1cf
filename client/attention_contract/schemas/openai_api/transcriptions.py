"""Requests and replies of OpenAI's API for the text of a sound, as its ``openai`` package writes and reads them.

Fields more than there: ``attention`` and ``alignment_heads``. Source: the types of ``openai`` 3.57.
"""

import struct
from base64 import b64encode
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, at_fault
from attention_contract.exact_types import Index
from attention_contract.schemas.analyses.probes import StopReason
from attention_contract.schemas.openai import (
    AttentionOfTokens,
    GeneratedToken,
    OpenAIRan,
    OpenAIRequest,
    Refused,
    TokenLogprob,
)
from attention_contract.schemas.openai_api.captions import captions
from attention_contract.schemas.openai_api.token_rows import table_of_tokens
from attention_contract.schemas.prompts import MAX_TEXT, AudioBytes


class GrowingSound(WireModel):
    """A sound of which more may come: its text goes on behind what was accepted, and stops where it looks at the end.

    Source: AlignAtt, Papi et al. 2023, section 3.
    """

    accepted: Annotated[list[Index], Field(max_length=4096)] = Field(default_factory=list)
    """The tokens that earlier replies about the beginning of the sound accepted."""
    frames: Annotated[int, Field(ge=0, le=4096)] = 25
    """The text stops before the first token whose alignment heads look most at one of the last frames of the sound.
    0 once the sound has ended: the text then goes on to its own end."""


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
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = None
    """``json``, by default: an object with the text. ``text``: the text alone. ``verbose_json``: with language, length
    and times. ``srt``, ``vtt``: the segments as captions."""
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    """Divides the logits before sampling. Default: 0, the most likely token each time."""
    timestamp_granularities: Listed[Literal["word", "segment"]] | None = Field(
        default=None, min_length=1, max_length=2
    )  # fmt: skip
    """The times in the reply in ``verbose_json``: those of words, of segments, or of both, by default. For segments,
    a model that has tokens of times writes them."""
    overlap: float | None = Field(default=None, ge=0, le=3600, allow_inf_nan=False)
    """Seconds that two windows have in common, into which a sound is cut that is longer than the model hears at a
    time: at most half of a window. Default: a sixth of a window."""
    stream: bool | None = None
    """Send pieces of the text as server-sent events as soon as they are known."""
    include: Listed[Literal["logprobs"]] | None = Field(default=None, max_length=1)
    """``logprobs``: return the log-probability of each token."""
    attention: AttentionOfTokens | None = None
    """Return the attention of each token with the seconds that it looked at, and edit attention."""
    alignment_heads: Annotated[list[tuple[Index, Index]], Field(min_length=1, max_length=1024)] | None = None
    """Layer and head that times are taken from: of cross-attentions, or of the text's layers in a model that reads
    texts with sounds. Default: those of the checkpoint's generation_config.json, or all heads of the later half."""
    growing: GrowingSound | None = None
    """The sound is the beginning of a longer one, or all of it; the reply tells the tokens that are accepted."""
    chunking_strategy: Refused = None
    known_speaker_names: Refused = None
    known_speaker_references: Refused = None

    @model_validator(mode="after")
    def _tells_times(self) -> "TranscriptionRequest":
        verbose = self.response_format == "verbose_json"
        if self.stream and self.response_format not in {None, "json", "text"}:
            raise at_fault("stream", f"its events have no form of {self.response_format}; leave one of them out")
        if self.timestamp_granularities is not None and not verbose:
            raise at_fault("timestamp_granularities", "it goes with the response_format verbose_json")
        if self.growing is not None and self.response_format not in {None, "json", "text"}:
            raise at_fault("growing", f"it goes with json or text; {self.response_format} is of a whole sound")
        if self.growing is not None and self.overlap is not None:
            raise at_fault("overlap", "a sound that grows is not cut into windows; leave one of them out")
        if self.alignment_heads is not None and not (verbose or self.attention or self.growing):
            raise at_fault("alignment_heads", "they go with verbose_json, attention or growing, which look at times")
        return self

    @property
    def tells_segments(self) -> bool:
        """True if the reply has segments."""
        asked = self.timestamp_granularities
        verbose = self.response_format == "verbose_json" and (asked is None or "segment" in asked)
        return verbose or self.response_format in {"srt", "vtt"}

    @property
    def tells_words(self) -> bool:
        """True if the reply has words."""
        asked = self.timestamp_granularities
        return self.response_format == "verbose_json" and (asked is None or "word" in asked)


class HeardWord(WireModel):
    """A word and its time in the sound, in seconds."""

    word: str
    start: float
    end: float


class HeardSegment(WireModel):
    """A piece of the text and its time in the sound. Its fields are those of OpenAI's Whisper."""

    id: int
    seek: int
    """The beginning of its window, in hundredths of a second."""
    start: float
    """Seconds."""
    end: float
    text: str
    tokens: list[int]
    """Its tokens, with those of times."""
    temperature: float
    avg_logprob: float
    """The mean log-probability of its tokens that are text."""
    compression_ratio: float
    """Bytes of the text by those that zlib makes of it: large for a text that repeats itself."""
    no_speech_prob: float | None = None
    """The probability that nothing is said in its window. Null if the model has no token for it."""


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
    segments: IfRequested[list[HeardSegment]] = ABSENT
    """With ``verbose_json``, ``srt`` and ``vtt``: as the tokens of times divide the text; of a model that has none,
    one for each window."""
    windows: IfRequested[list[tuple[float, float]]] = ABSENT
    """Begin and end in seconds of the windows into which a sound was cut."""
    accepted: IfRequested[list[int]] = ABSENT
    """With ``growing``: the tokens of the text, to be sent with the longer sound."""
    reached: IfRequested[float] = ABSENT
    """With ``growing``, if tokens are new: the second behind the frame that the last of them looked at most."""
    usage: IfRequested[HeardDuration] = ABSENT
    ran: IfRequested[OpenAIRan] = ABSENT
    attention: IfRequested[list[GeneratedToken]] = ABSENT
    """The tokens, each with ``seconds`` and the attention that chose it."""
    stop_reason: IfRequested[StopReason] = ABSENT
    prompt_scores: IfRequested[dict[str, list[float]]] = ABSENT

    def to_table(self, heads: Sequence[int] | None = None) -> Any:
        """Return the attention of the tokens as a ``pyarrow.Table``, with their seconds; see ``table_of_tokens``.

        ``heads``: the numbers of the heads, by default those of the request. Needs the extra ``tables``. Raises
        ImportError.
        """
        return table_of_tokens([(0, self.attention)], heads or self.request_names.heads)

    def captions(self, form: Literal["srt", "vtt"]) -> str:
        """Write its segments as captions. Raises ValueError without them."""
        if not isinstance(self.segments, list):
            raise ValueError('it has no segments; ask with response_format="verbose_json"')
        return captions(((one.start, one.end, one.text) for one in self.segments), form)


class TranscriptionEvent(WireModel):
    """A piece of a streamed text, or the whole of it at the end."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: IfRequested[str] = ABSENT
    text: IfRequested[str] = ABSENT
    accepted: IfRequested[list[int]] = ABSENT
    """In the last event, with ``growing``, as ``reached`` is."""
    reached: IfRequested[float] = ABSENT
    logprobs: IfRequested[list[TokenLogprob]] = ABSENT
    attention: IfRequested[list[GeneratedToken]] = ABSENT
    stop_reason: IfRequested[StopReason] = ABSENT
    prompt_scores: IfRequested[dict[str, list[float]]] = ABSENT
    ran: IfRequested[OpenAIRan] = ABSENT
    """In the last event."""


_SILENCE: Final = struct.pack(
    "<4sI4s4sIHHIIHH4sI80s", b"RIFF", 116, b"WAVE", b"fmt ", 16, 1, 1, 8000, 8000, 1, 8, b"data", 80, b"\x80" * 80
)
"""A WAV file of 10 milliseconds."""
EXAMPLE_SOUND: Final[dict[str, Any]] = {"model": "tiny", "file": {"base64": b64encode(_SILENCE).decode()}}

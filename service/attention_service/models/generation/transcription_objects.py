"""The text of a sound in the forms of OpenAI's objects: an event for each piece of a stream, or one object of all."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from attention_contract.schemas.openai_api.transcriptions import TranscriptionRequest
from attention_service.models.generation.completion_objects import Token
from attention_service.models.generation.heard_frames import HeardFrames
from attention_service.models.generation.token_logprobs import Json
from attention_service.models.inputs.sounds.timed_words import timed_words

_WITHOUT_SPACES: Final = frozenset({"chinese", "japanese", "thai", "lao", "myanmar", "cantonese"})
"""Languages whose words no space divides: each piece of their text is one."""


@dataclass(eq=False)
class TranscriptionObjects:
    """Writes the objects of one request."""

    request: TranscriptionRequest
    heard: HeardFrames
    language: str | None = None
    """Known once the prompt is."""
    generated: int = 0
    cached: int = 0
    """Nothing of a sound was read before."""
    _collected: list[Token] = field(default_factory=list)

    def begin(self) -> list[Json]:
        """Nothing comes before the first token."""
        return []

    def add(self, tokens: list[Token]) -> list[Json]:
        """The events of a step, over one choice."""
        self.generated += len(tokens)
        for token in tokens:
            if token.attention is not None:
                token.attention |= {"seconds": self.heard.looked_at}
        self._collected += tokens
        if not self.request.stream:
            return []
        shown = [each for each in tokens if each.text or each.attention]
        return [{"type": "transcript.text.delta", "delta": each.text} | _more([each]) for each in shown]

    def end(self, ran: Json, *, keeps: bool = False) -> list[Json]:
        """The last event of a stream, or the whole object; nothing is kept."""
        text = "".join(token.text for token in self._collected).strip()
        if self.request.stream:
            return [{"type": "transcript.text.done", "text": text, "ran": ran}]
        self._cut_spaces()
        usage = {"type": "duration", "seconds": self.heard.length}
        found: Json = {"text": text, "usage": usage, "ran": ran} | _more(self._collected)
        if self.request.response_format == "verbose_json":
            found |= {
                "task": "transcribe",
                "language": self.language,
                "duration": self.heard.length,
                "words": self._words(),
            }
        return [found]

    def _cut_spaces(self) -> None:
        """Leave the spaces around the text out of the bytes of its tokens, as they are left out of the text."""
        scored = [token.logprob.chosen for token in self._collected if token.logprob is not None]
        text = b"".join(each.raw for each in scored).decode(errors="surrogateescape")
        before = len(text[: len(text) - len(text.lstrip())].encode(errors="surrogateescape"))
        end = len(text.rstrip().encode(errors="surrogateescape"))
        at = 0
        for each in scored:
            begin, at = at, at + len(each.raw)
            each.raw = each.raw[max(before - begin, 0) : max(end - begin, 0)]

    def _words(self) -> list[Json]:
        """The words with their times."""
        parts = [token.raw for token in self._collected]
        spaced = self.language not in _WITHOUT_SPACES
        return [each._asdict() for each in timed_words(parts, self.heard.times().tolist(), spaced=spaced)]


def _more(tokens: Sequence[Token]) -> Json:
    """Attention and log-probabilities of tokens, if they were asked."""
    attention = [token.attention for token in tokens if token.attention is not None]
    logprobs = [token.logprob.chosen.entry for token in tokens if token.logprob is not None]
    found: dict[str, Any] = {"attention": attention} if attention else {}
    return found | ({"logprobs": logprobs} if logprobs else {})

"""The text of a sound in the forms of OpenAI's objects: an event for each piece of a stream, or one object of all."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from attention_contract.schemas.openai_api.transcriptions import TranscriptionRequest
from attention_service.models.generation.completion_objects import Json, Token
from attention_service.models.generation.heard_frames import HeardFrames

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

    def _words(self) -> list[Json]:
        """The words with their times: each begins where the token before it ends."""
        ends = self.heard.ends()
        found: list[Json] = []
        for at, token in enumerate(self._collected):
            if not token.text:
                continue
            first = not found or token.text[:1].isspace() or self.language in _WITHOUT_SPACES
            if first and token.text.strip():
                found.append({"word": "", "start": float(ends[at - 1]) if at else 0.0, "end": 0.0})
            if found:
                found[-1]["word"] = (found[-1]["word"] + token.text).strip()
                found[-1]["end"] = float(ends[at])
        return found


def _more(tokens: Sequence[Token]) -> Json:
    """Attention and log-probabilities of tokens, if they were asked."""
    attention = [token.attention for token in tokens if token.attention is not None]
    logprobs = [
        {name: token.logprob[name] for name in ("token", "bytes", "logprob")}
        for token in tokens if token.logprob is not None
    ]  # fmt: skip
    found: dict[str, Any] = {"attention": attention} if attention else {}
    return found | ({"logprobs": logprobs} if logprobs else {})

"""The text of a sound in the forms of OpenAI's objects: an event for each piece of a stream, or one object of all."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

from attention_contract.schemas.openai_api.transcriptions import TranscriptionRequest
from attention_service.models.generation.decoding.heard_frames import HeardFrames
from attention_service.models.generation.objects.completion_objects import Token, watched
from attention_service.models.generation.objects.heard_segments import segments
from attention_service.models.generation.objects.heard_windows import HeardWindow, join
from attention_service.models.generation.objects.token_logprobs import Json
from attention_service.models.inputs.sounds.spoken_languages import language_name
from attention_service.models.inputs.sounds.time_tokens import TimeTokens
from attention_service.models.inputs.sounds.timed_words import timed_words

_WITHOUT_SPACES: Final = frozenset({"chinese", "japanese", "thai", "lao", "myanmar", "cantonese"})
"""Languages whose words no space divides: each piece of their text is one."""


@dataclass(eq=False)
class TranscriptionObjects:
    """Writes the objects of one request."""

    request: TranscriptionRequest
    windows: Sequence[tuple[float, float]]
    """Begin and end of each window in seconds."""
    times: TimeTokens | None = None
    """The tokens of times among those of the text."""
    language: str | None = None
    """In English. Known once the prompt is."""
    language_token: str | None = None
    """The token of it, if the model has one."""
    prefix: str = ""
    """The text of the tokens that were accepted before."""
    generated: int = 0
    cached: int = 0
    """Nothing of a sound was read before."""
    _reached: float | None = None
    """The second behind the frame that the last token of the text looked at."""
    _heard: list[HeardWindow] = field(default_factory=list)
    """The windows that have begun."""

    def begin(self) -> list[Json]:
        """Nothing comes before the first token."""
        return []

    def begin_window(self, frames: HeardFrames, token: str | None, named: str | None) -> None:
        """Begin the text of the next window, whose first tokens have this ``token`` of a language.

        ``named``: the language that its prompt names.
        """
        code = None if token is None else token.strip("<|>")
        self.language_token, self.language = token, named or (None if code is None else language_name(code) or code)
        self._heard.append(HeardWindow(*self.windows[len(self._heard)], frames))

    def add(self, tokens: list[Token]) -> list[Json]:
        """The events of a step, over one choice.

        The text of one window of several comes as one event, once that of the next is known: they have a part in
        common.
        """
        self.generated += len(tokens)
        window = self._heard[-1]
        if tokens[-1].id >= 0 and (part := window.frames.looked_at) is not None:
            self._reached = part[1]
        for token in tokens:
            if token.attention is not None:
                token.attention |= {"seconds": window.frames.looked_at}
        window.tokens += tokens
        if len(self.windows) > 1:
            return self._join() if tokens[-1].finish is not None else []
        if not self.request.stream:
            return []
        shown = [token for token in tokens if token.text or token.attention]
        return [self._event(token.text, [token]) for token in shown]

    def end(self, ran: Json, *, keeps: bool = False) -> list[Json]:
        """The last event of a stream, or the whole object; nothing is kept."""
        text = (self.prefix + "".join(self._text_of(window) for window in self._heard)).strip()
        accepted: Json = {}
        if (growing := self.request.growing) is not None:
            accepted = {"accepted": [*growing.accepted, *(token.id for token in self._tokens if token.id >= 0)]}
            accepted |= {} if self._reached is None else {"reached": self._reached}
        if self.request.stream:
            last = self._events(self._heard[-1:]) if len(self.windows) > 1 else []
            return [*last, {"type": "transcript.text.done", "text": text, "ran": ran} | accepted]
        tokens, length = self._tokens, self._heard[-1].frames.length
        self._cut_spaces()
        usage = {"type": "duration", "seconds": length}
        reply: Json = {"text": text, "usage": usage, "ran": ran} | accepted | self._more(tokens)
        if self.request.response_format == "verbose_json":
            reply |= {"task": "transcribe", "language": self.language, "duration": length}
        if self.request.tells_words:
            reply["words"] = self._words()
        if self.request.tells_segments:
            reply["segments"] = segments(self._heard, self.times, self.request.temperature or 0.0)
        if len(self.windows) > 1 and self.request.response_format == "verbose_json":
            reply["windows"] = self.windows
        return [reply]

    def _join(self) -> list[Json]:
        """Join the last window with the one before. Returns the events of that, which is known now."""
        if len(self._heard) < 2:
            return []
        left, right = self._heard[-2:]
        join(left, right, self.times, spaced=self._spaced)
        before, place = (left.tokens[left.kept.stop - 1] if left.kept else None), right.kept
        if before is not None and place and self._spaced:
            after = right.tokens[place.start]
            if not (before.raw[-1:].isspace() or after.raw[:1].isspace()):
                after.raw, after.text = b" " + after.raw, " " + after.text  # no token before it told of a space
        return self._events([left]) if self.request.stream else []

    @property
    def _spaced(self) -> bool:
        return self.language not in _WITHOUT_SPACES

    @property
    def _tokens(self) -> list[Token]:
        return [window.tokens[at] for window in self._heard for at in window.kept]

    def _text_of(self, window: HeardWindow) -> str:
        """The text that a window has in the whole."""
        tokens = [window.tokens[at] for at in window.kept]
        if len(self.windows) == 1:
            return "".join(token.text for token in tokens)
        return b"".join(token.raw for token in tokens).decode(errors="replace")

    def _events(self, windows: Sequence[HeardWindow]) -> list[Json]:
        return [
            self._event(self._text_of(window), [window.tokens[at] for at in window.kept])
            for window in windows if window.kept
        ]  # fmt: skip

    def _event(self, text: str, tokens: Sequence[Token]) -> Json:
        return {"type": "transcript.text.delta", "delta": text} | self._more(tokens)

    def _cut_spaces(self) -> None:
        """Leave the spaces around the text out of the bytes of its tokens, as they are left out of the text."""
        scored = [token.logprob.chosen for token in self._tokens if token.logprob is not None]
        text = b"".join(piece.raw for piece in scored).decode(errors="surrogateescape")
        before = len(text[: len(text) - len(text.lstrip())].encode(errors="surrogateescape"))
        end = len(text.rstrip().encode(errors="surrogateescape"))
        at = 0
        for piece in scored:
            begin, at = at, at + len(piece.raw)
            piece.raw = piece.raw[max(before - begin, 0) : max(end - begin, 0)]

    def _words(self) -> list[Json]:
        """The words with their times."""
        places = [(window, at) for window in self._heard for at in window.kept]
        parts = [window.tokens[at].raw for window, at in places]
        begins = accumulate((window.times[at] for window, at in places), max)
        end = self._heard[-1].times[-1]
        return [word._asdict() for word in timed_words(parts, [*begins, end], spaced=self._spaced)]

    def _more(self, tokens: Sequence[Token]) -> Json:
        """Attention and log-probabilities of tokens, if they were asked."""
        attention = [token.attention for token in tokens if token.attention is not None]
        more: dict[str, Any] = ({"attention": attention} if attention else {}) | watched(tokens)
        if not self.request.include:
            return more
        logprobs = [token.logprob.chosen.entry for token in tokens if token.logprob is not None]
        return more | ({"logprobs": logprobs} if logprobs else {})

"""Segments of the text of a sound: as the tokens of times divide it, or one for each window."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from attention_service.models.generation.objects.completion_objects import Token
from attention_service.models.generation.objects.heard_windows import HeardWindow
from attention_service.models.generation.objects.token_logprobs import Json
from attention_service.models.inputs.sounds.time_tokens import TimeTokens


@dataclass(eq=False)
class _Segment:
    """Tokens of a window, between two times."""

    window: HeardWindow
    start: float | None = None
    """Seconds; None where no token tells it."""
    end: float | None = None
    places: list[int] = field(default_factory=list)
    """The tokens that are text."""
    ids: list[int] = field(default_factory=list)
    """All of them."""

    @property
    def tokens(self) -> list[Token]:
        return [self.window.tokens[at] for at in self.places]

    @property
    def text(self) -> str:
        return b"".join(token.raw for token in self.tokens).decode(errors="replace")

    def entry(self, number: int, temperature: float) -> Json:
        """The fields of the schema ``HeardSegment``."""
        text, window = self.text, self.window
        scores = [token.logprob.chosen.logprob for token in self.tokens if token.logprob is not None]
        known = [score for score in scores if score is not None]
        start = window.times[self.places[0]] if self.start is None else self.start
        raw = text.encode()
        return {
            "id": number,
            "seek": round(100 * window.begin),
            "start": round(start, 3),
            "end": round(max(start, window.times[self.places[-1] + 1] if self.end is None else self.end), 3),
            "text": text,
            "tokens": self.ids,
            "temperature": temperature,
            "avg_logprob": fmean(known) if known else 0.0,
            "compression_ratio": len(raw) / len(zlib.compress(raw)),
            "no_speech_prob": window.frames.no_speech,
        }


def segments(windows: Sequence[HeardWindow], times: TimeTokens | None, temperature: float) -> list[Json]:
    """The segments of the tokens of some windows that belong to the whole; those without text are left out.

    A token of a time ends a segment, or begins one. Where none does, the time of its first or last token does.
    """
    divided = (segment for window in windows for segment in _divided(window, times))
    shown = [segment for segment in divided if segment.text.strip()]
    return [segment.entry(number, temperature) for number, segment in enumerate(shown)]


def _divided(window: HeardWindow, times: TimeTokens | None) -> Iterator[_Segment]:
    segment = _Segment(window)
    for at in window.kept:
        token = window.tokens[at]
        seconds = None if times is None else times.seconds(token.id)
        if seconds is None:
            if token.raw:
                segment.places.append(at)
                segment.ids.append(token.id)
            continue
        second = min(window.begin + seconds, window.end)
        segment.ids.append(token.id)
        if segment.places:
            segment.end = second
            yield segment
            segment = _Segment(window)
        else:
            segment.start, segment.ids = second, [token.id]
    yield segment

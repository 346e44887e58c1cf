"""The texts of the windows of a sound, and where the text of one goes over into that of the next."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

from attention_service.models.generation.decoding.heard_frames import HeardFrames
from attention_service.models.generation.objects.completion_objects import Token
from attention_service.models.inputs.sounds.time_tokens import TimeTokens

_CONTINUES: Final = 0x80
"""The upper bits of a byte of UTF-8 that does not begin a character."""


@dataclass(eq=False)
class HeardWindow:
    """The text of a window."""

    begin: float
    """Seconds."""
    end: float
    frames: HeardFrames
    tokens: list[Token] = field(default_factory=list)
    first: int = 0
    """The first token that belongs to the text of the whole."""
    last: int | None = None
    """The token behind the last that does; None if all do."""

    @cached_property
    def times(self) -> list[float]:
        """The second at which each token begins, and the last ends, once all are there."""
        return [float(x) for x in self.frames.times()]

    @property
    def kept(self) -> range:
        """The places of the tokens that belong to the text of the whole."""
        return range(self.first, max(self.first, len(self.tokens) if self.last is None else self.last))


class _CommonTokens(NamedTuple):
    """Tokens that two windows have in common."""

    left: int
    right: int
    length: int


def join(left: HeardWindow, right: HeardWindow, times: TimeTokens | None, *, spaced: bool) -> None:
    """Find where the text of a window goes over into that of the next, which begins before it ends.

    It does within the longest run of equal tokens that begin in both at the same time, to half of the overlap, where a
    word begins next to its middle. Without such a run it does at the first words that begin behind the middle of the
    overlap. ``spaced``: False for a language whose words no space divides.
    """
    if (overlap := left.end - right.begin) <= 0:
        return
    run = _longest_run(_texts(left, times), _texts(right, times), left, right, overlap / 2)
    if run is None:
        middle = right.begin + overlap / 2
        left.last, right.first = (_first_word(window, middle, spaced=spaced) for window in (left, right))
    else:
        places = [
            at for at in range(run.length + 1)
            if run.right + at == len(right.tokens) or _begins_word(right.tokens[run.right + at], spaced=spaced)
        ]  # fmt: skip
        at = min(places or range(run.length + 1), key=lambda place: abs(2 * place - run.length))
        left.last, right.first = run.left + at, run.right + at
    left.last = max(left.first, left.last)


def _texts(window: HeardWindow, times: TimeTokens | None) -> list[int]:
    """The places of the tokens that are text."""
    return [
        at for at, token in enumerate(window.tokens)
        if token.raw and (times is None or times.seconds(token.id) is None)
    ]  # fmt: skip


def _longest_run(
    lefts: Sequence[int], rights: Sequence[int], left: HeardWindow, right: HeardWindow, most_s: float
) -> _CommonTokens | None:
    """The longest run of equal tokens that begin at most so many seconds apart, one behind the other in both."""
    best: tuple[int, float, _CommonTokens] | None = None
    before: dict[tuple[int, int], int] = {}
    near = [at for at in lefts if left.times[at] >= right.begin - most_s]
    for i in near:
        for j in rights:
            apart = abs(left.times[i] - right.times[j])
            if left.tokens[i].id != right.tokens[j].id or apart > most_s:
                continue
            length = before[i, j] = before.get((i - 1, j - 1), 0) + 1
            key = length, -apart, _CommonTokens(i - length + 1, j - length + 1, length)
            best = key if best is None or key[:2] > best[:2] else best
    return None if best is None else best[2]


def _first_word(window: HeardWindow, second: float, *, spaced: bool) -> int:
    """The first token from a second on that begins a word; one behind the last if there is none."""
    places = (at for at, time in enumerate(window.times[:-1]) if time >= second)
    return next((at for at in places if _begins_word(window.tokens[at], spaced=spaced)), len(window.tokens))


def _begins_word(token: Token, *, spaced: bool) -> bool:
    """True for a token that begins a word, or whose text begins with a whole character where no space divides words."""
    return token.raw[:1].isspace() if spaced else bool(token.raw) and token.raw[0] & 0xC0 != _CONTINUES

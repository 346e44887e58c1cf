"""The words of a text with the times of its tokens, however these divide it."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

_WORD: Final = re.compile(r"\S+")


class TimedWord(NamedTuple):
    """A word of a text that is written down from a sound."""

    word: str
    start: float
    """Seconds."""
    end: float


def timed_words(parts: Sequence[bytes], times: Sequence[float], *, spaced: bool = True) -> list[TimedWord]:
    """Return the words of a text that comes in ``parts``, as spaces divide it.

    ``times``: the second at which each part begins, and at which the last ends. A word begins behind the word before,
    with the spaces between them. Where a part has the end of one and the beginning of another, its time is divided by
    their bytes. ``spaced``: False for a language without spaces, of which each part is a word.
    """
    edges = [0, *accumulate(map(len, parts))]
    raw = b"".join(parts)
    words, done = [], 0
    for begin, end in _word_places(raw, edges, spaced=spaced):
        words.append(
            TimedWord(raw[begin:end].decode(errors="replace"), _begin(edges, times, done), _end(edges, times, end))
        )
        done = end
    return words


def _word_places(raw: bytes, edges: Sequence[int], *, spaced: bool) -> Iterator[tuple[int, int]]:
    """The first byte of each word, and the one behind its last."""
    text = raw.decode(errors="surrogateescape")  # a character for each byte of none
    places = [0, *accumulate(len(character.encode(errors="surrogateescape")) for character in text)]
    characters = set(places)
    for word in _WORD.finditer(text):
        begin, end = places[word.start()], places[word.end()]
        inner = [] if spaced else [edge for edge in edges if begin < edge < end and edge in characters]
        yield from pairwise(dict.fromkeys([begin, *inner, end]))


def _begin(edges: Sequence[int], times: Sequence[float], byte: int) -> float:
    """The time before a byte, which is of the part that it is in."""
    return _within(edges, times, bisect_right(edges, byte) - 1, byte)


def _end(edges: Sequence[int], times: Sequence[float], byte: int) -> float:
    """The time up to a byte, which is of the part that the byte before it is in."""
    return _within(edges, times, bisect_left(edges, byte) - 1, byte)


def _within(edges: Sequence[int], times: Sequence[float], part: int, byte: int) -> float:
    (first, last), (begin, end) = edges[part : part + 2], times[part : part + 2]
    return float(begin + (end - begin) * (byte - first) / (last - first))

"""The sentences of a text, by their characters."""

import re
from typing import Final

_END: Final = re.compile(r"""[.!?…]+["'”’)\]]*(?=\s)|[。！？]+[」』”’]*|\n""")
"""The end of a sentence: a mark with what closes behind it, and a space; or the end of a line."""
_SHORT: Final = frozenset({
    "mr", "mrs", "ms", "dr", "prof", "st", "vs", "e.g", "i.e", "cf", "fig", "figs", "eq", "no", "nr", "vol", "al",
})  # fmt: skip
"""Words that a full stop shortens, in lower case and without it."""


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Return the first and last (exclusive) character of each sentence, without the spaces around it.

    A sentence ends at ``.``, ``!``, ``?`` or ``…`` before a space, at their full-width forms, and with its line.
    A full stop behind a single letter, a number of a list or a usual abbreviation ends none.
    """
    spans: list[tuple[int, int]] = []
    begin = 0
    for end in _END.finditer(text):
        if end[0] == "." and _is_short(text[begin : end.start()]):
            continue
        _add(spans, text, begin, end.end())
        begin = end.end()
    _add(spans, text, begin, len(text))
    return spans


def _is_short(before: str) -> bool:
    """True if a full stop behind this text shortens its last word, or numbers a line."""
    words = before.split()
    last = words[-1].lstrip("([\"'“‘") if words else ""
    single = len(last) == 1 and last.isalpha() and last not in {"I", "a"}
    return single or last.lower() in _SHORT or (len(words) == 1 and last.isdigit())


def _add(spans: list[tuple[int, int]], text: str, begin: int, end: int) -> None:
    piece = text[begin:end]
    first = begin + len(piece) - len(piece.lstrip())
    last = begin + len(piece.rstrip())
    if first < last:
        spans.append((first, last))

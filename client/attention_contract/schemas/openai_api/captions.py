"""Captions of a sound: SubRip (``srt``) and WebVTT (``vtt``, W3C Candidate Recommendation of 2019)."""

from collections.abc import Iterable
from html import escape
from typing import Literal

Cue = tuple[float, float, str]
"""Begin and end in seconds, and the text."""


def captions(cues: Iterable[Cue], form: Literal["srt", "vtt"]) -> str:
    """Write captions. A cue without text is left out, and each takes a millisecond at least."""
    shown = [(begin, end, " ".join(text.split())) for begin, end, text in cues if text.strip()]
    if form == "srt":
        return "".join(
            f"{number}\n{_times(begin, end, ',')}\n{text.replace('-->', '->')}\n\n"
            for number, (begin, end, text) in enumerate(shown, 1)
        )
    return "WEBVTT\n\n" + "".join(
        f"{_times(begin, end, '.')}\n{escape(text, quote=False)}\n\n" for begin, end, text in shown
    )


def _times(begin: float, end: float, point: str) -> str:
    first = round(1000 * begin)
    return f"{_time(first, point)} --> {_time(max(round(1000 * end), first + 1), point)}"


def _time(milliseconds: int, point: str) -> str:
    seconds, thousandths = divmod(milliseconds, 1000)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{point}{thousandths:03}"

"""The sizes of texts before they are drawn, and texts cut or wrapped to a width."""

import unicodedata
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Final

from matplotlib.font_manager import FontProperties, fontManager
from matplotlib.textpath import text_to_path

_CJK: Final = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Noto Sans CJK TC", "Noto Sans SC", "Noto Sans JP",
    "Noto Sans KR", "Source Han Sans SC", "Source Han Sans", "PingFang SC", "Hiragino Sans", "Apple SD Gothic Neo",
    "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "IPAexGothic",
    "IPAGothic", "VL Gothic", "NanumGothic", "Droid Sans Fallback", "Arial Unicode MS", "Unifont",
)  # fmt: skip
"""Families with Chinese, Japanese or Korean glyphs, of the usual systems."""


@cache
def families() -> list[str]:
    """The families of all text: matplotlib's own, then those of this machine that have the glyphs it lacks."""
    installed = set(fontManager.get_font_names())
    return ["DejaVu Sans", *(name for name in _CJK if name in installed)]


@lru_cache(4096)
def width_of(text: str, size: float, *, bold: bool = False) -> float:
    """The width of a text in inches. A wide character takes at least an em, which a viewer's font will give it."""
    font = FontProperties(family=families(), size=size, weight="bold" if bold else "normal")
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    wide = sum(unicodedata.east_asian_width(one) in "WF" for one in text)
    return max(float(width), wide * size) / 72


def widest(texts: Sequence[str], size: float) -> float:
    """The width of the widest text in inches; only the longest are measured."""
    return max((width_of(text, size) for text in sorted(set(texts), key=_letters)[-12:]), default=0.0)


def _letters(text: str) -> int:
    return len(text) + sum(unicodedata.east_asian_width(one) in "WF" for one in text)


def clipped(text: str, most: int) -> str:
    """The text, its end cut off if it has more characters than these."""
    return text if len(text) <= most else f"{text[: max(most - 1, 1)]}…"


def fitted(text: str, size: float, inches: float) -> str:
    """The text, its end cut off if it is wider than this."""
    most = len(text)
    while most > 1 and width_of(clipped(text, most), size) > inches + 1e-6:
        most -= 1
    return clipped(text, most)


def wrapped(text: str, size: float, inches: float, *, bold: bool = False) -> list[str]:
    """The lines of a text that are no wider than this. A word that is wider is broken."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        longer = f"{line} {word}" if line else word
        if line and width_of(longer, size, bold=bold) > inches:
            lines.append(line)
            longer = word
        while len(longer) > 1 and width_of(longer, size, bold=bold) > inches:
            most = len(longer) - 1
            while most > 1 and width_of(longer[:most], size, bold=bold) > inches:
                most -= 1
            lines.append(longer[:most])
            longer = longer[most:]
        line = longer
    return [*lines, line] if line else lines

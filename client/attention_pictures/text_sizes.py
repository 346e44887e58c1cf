"""The sizes of texts before they are drawn, and texts cut or wrapped to a width."""

import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
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


@cache
def _glyphs() -> dict[str, frozenset[int]]:
    """The characters of each font file of ``families``."""
    files = dict.fromkeys(findfont(FontProperties(family=[name])) for name in families())
    return {str(file): frozenset(get_font(file).get_charmap()) for file in files}


def missing_characters(texts: Iterable[str]) -> str:
    """The characters of the texts that no font of this machine has, of those in ``families``."""
    return "".join(sorted(one for one in set().union(*texts) if not any(ord(one) in has for has in _glyphs().values())))


def font_type_of_pdf(texts: Iterable[str]) -> int:
    """The type of the fonts in a PDF with these texts: 42 keeps a TrueType font, 3 keeps the outlines of its glyphs.

    Matplotlib writes fonts with PostScript outlines, as Noto Sans CJK, wrongly as type 42: readers then show nothing.
    """
    for one in set().union(*texts):
        file = next((file for file, has in _glyphs().items() if ord(one) in has), None)
        if file is not None and _has_postscript_outlines(file):
            return 3
    return 42


@cache
def _has_postscript_outlines(file: str) -> bool:
    """True for an OpenType font, or the first of a collection, whose outlines are CFF (OpenType, "Font Tables")."""
    with Path(file).open("rb") as font:
        if font.read(4) == b"ttcf":
            font.seek(12)
            font.seek(int.from_bytes(font.read(4), "big"))
        else:
            font.seek(0)
        return font.read(4) == b"OTTO"


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

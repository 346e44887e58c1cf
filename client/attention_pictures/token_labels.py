"""Labels of tokens along an axis: all that fit, rotated or skipped where there are too many."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from attention_pictures.figure_style import clipped

_MOST_LETTERS: Final = 18
_LINE: Final = 1.25
"""The height of a line of text, in sizes of its font."""
_STEPS: Final = (1, 2, 5)


@dataclass(frozen=True)
class Ticks:
    """The labels of an axis that fit."""

    places: list[float]
    """In cells."""
    texts: list[str]
    rotated: bool
    size: float
    """The font size in points."""
    depth: float
    """Inches that the labels take beside the axis."""


def readable(label: str) -> str:
    """The label without what no font shows: such characters are escaped, long ones cut."""
    shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in label)
    return clipped(shown, _MOST_LETTERS)


def width_of(text: str, size: float) -> float:
    """The width of a text in inches."""
    width, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=size), ismath=False)
    return float(width) / 72


def ticks(
    labels: Sequence[str] | None, tokens: int, pooled: int, inches: float, *, across: bool, size: float = 7
) -> Ticks:
    """Choose the labels of an axis of so many tokens, of which ``pooled`` make a cell.

    ``across``: the axis is horizontal. Without labels, numbers stand at round steps.
    """
    line, pitch = size * _LINE / 72, inches / max(tokens, 1)
    if labels is None:
        widest = width_of(str(tokens), size) * 1.6 if across else line * 1.6
        step = _round_step(widest / pitch)
        at, texts, rotated = list(range(0, tokens, step)), [str(n) for n in range(0, tokens, step)], False
    else:
        shown = [readable(label) for label in labels[:tokens]]
        shown += [""] * (tokens - len(shown))  # keys that the module adds
        longest = max((width_of(text, size) for text in sorted(shown, key=len)[-8:]), default=0.0)
        rotated = across and longest + 0.04 > pitch
        step = max(1, ceil((line if rotated or not across else longest + 0.04) / pitch))
        at = list(range(0, tokens, step))
        texts = [shown[n] for n in at]
    widths = max((width_of(text, size) for text in sorted(texts, key=len)[-8:]), default=0.0)
    depth = line if across and not rotated else widths
    return Ticks([(n + 0.5) / pooled - 0.5 for n in at], texts, rotated, size, depth + 0.06)


def _round_step(least: float) -> int:
    """The least of 1, 2, 5, 10, 20, … that is as large."""
    power = 1
    while True:
        for step in _STEPS:
            if step * power >= least:
                return step * power
        power *= 10


def put(axes: Axes, rows: Ticks | None, columns: Ticks | None) -> None:
    """Write the labels at the axes; None for no labels on that side."""
    if columns is None:
        axes.set_xticks([])
    else:
        axes.set_xticks(columns.places, columns.texts, rotation=90 if columns.rotated else 0, fontsize=columns.size)
    if rows is None:
        axes.set_yticks([])
    else:
        axes.set_yticks(rows.places, rows.texts, fontsize=rows.size)

"""Labels of tokens along an axis: all that fit, rotated or skipped where there are too many."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from matplotlib.axes import Axes

from attention_pictures.pooled_cells import plural
from attention_pictures.text_sizes import clipped, fitted, widest, width_of

_MOST_LETTERS: Final = 18
_LINE: Final = 1.25
"""The height of a line of text, in sizes of its font."""
_STEPS: Final = (1, 2, 5)
_SMALLEST: Final = 5.0
"""The size of font, in points, below which labels are skipped instead."""


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
    skipped: int = 1
    """The tokens of which one has its label."""


def readable(label: str) -> str:
    """The label without what no font shows: such characters are escaped, long ones cut."""
    shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in label)
    return clipped(shown, _MOST_LETTERS)


def ticks(
    labels: Sequence[str] | None, tokens: int, pooled: int, inches: float, *, across: bool, size: float = 7,
    most_width: float | None = None,
) -> Ticks:  # fmt: skip
    """Choose the labels of an axis of so many tokens, of which ``pooled`` make a cell.

    ``across``: the axis is horizontal. ``most_width``: the inches beside a vertical axis, to which labels are cut. If
    there are no labels, numbers stand at round steps. Labels get smaller, then some are skipped, until they fit.
    """
    pitch = inches / max(tokens, 1)
    if labels is None:
        last = str(max(tokens - 1, 0))
        line = size * _LINE / 72
        step = _round_step((width_of(last, size) * 1.6 if across else line * 1.6) / pitch)
        at, texts, rotated = list(range(0, tokens, step)), [str(n) for n in range(0, tokens, step)], False
        return Ticks(_places(at, pooled, step), texts, rotated, size, (line if across else widest(texts, size)) + 0.06)
    shown = [readable(label) for label in labels[:tokens]]
    shown += [""] * (tokens - len(shown))  # keys that the module adds
    while True:
        texts = shown if most_width is None else [fitted(text, size, most_width) for text in shown]
        line, longest = size * _LINE / 72, widest(texts, size)
        rotated = across and longest + 0.04 > pitch
        step = max(1, ceil((line if rotated or not across else longest + 0.04) / pitch - 1e-6))
        if step == 1 or size <= _SMALLEST:
            break
        size = max(size - 0.5, _SMALLEST)
    at = list(range(0, tokens, step))
    texts = [texts[n] for n in at]
    depth = line if across and not rotated else widest(texts, size)
    return Ticks(_places(at, pooled, step), texts, rotated, size, depth + 0.06, step)


def _places(tokens: Sequence[int], pooled: int, step: int) -> list[float]:
    """The middles of the cells that have these tokens, in cells; of several tokens in a cell, their own middles."""
    return [float(n // pooled) if step >= pooled else (n + 0.5) / pooled - 0.5 for n in tokens]


def skipping_note(rows: Ticks, columns: Ticks, names: tuple[str, str] = ("query", "key")) -> list[str]:
    """The sentence that states which labels are left out; none if there are none."""
    sides = [(each.skipped, name) for each, name in zip((rows, columns), names, strict=True)]
    notes = list(dict.fromkeys(f"1 of {step} {plural(name)}" for step, name in sides if step > 1))
    return [f"labelled: {' and '.join(notes)}"] if notes else []


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

"""Labels of tokens along an axis: all that fit, rotated or skipped where there are too many."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from matplotlib.axes import Axes

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.picture_options import Positions
from attention_pictures.pooled_cells import plural
from attention_pictures.text_sizes import clipped, fitted, widest, width_of

_MOST_LETTERS: Final = 18
_LINE: Final = 1.25
"""The height of a line of text, in sizes of its font."""
_STEPS: Final = (1, 2, 5)
_MARK: Final = "·"
"""Stands between a label and the index of its token."""
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


def labels_in_place(tokens: Sequence[str], labels: Sequence[str] | None) -> Sequence[str]:
    """Return the labels of the tokens of a text, by default the tokens. Raises InvalidRequest for another number."""
    if labels is not None and len(labels) != len(tokens):
        raise InvalidRequest.at("labels", f"expected {len(tokens)} labels, one for each token; got {len(labels)}")
    return tokens if labels is None else labels


def numbered(
    labels: Sequence[str] | None, positions: Positions, chosen: Sequence[int] | None = None
) -> Sequence[str] | None:
    """The labels of an axis with the index of a token behind its label, as in ``cat·2``; of those chosen.

    ``positions``: of all tokens, of none, or of those whose label is repeated. The index is never cut off.
    """
    if labels is None:
        return None if chosen is None else [str(at) for at in chosen]
    if positions == "none":
        return labels if chosen is None else [labels[at] for at in chosen]
    times = Counter(labels)
    shown = [
        f"{clipped(readable(label), _MOST_LETTERS - 1 - len(str(at)))}{_MARK}{at}"
        if positions == "all" or times[label] > 1
        else label
        for at, label in enumerate(labels)
    ]
    return shown if chosen is None else [shown[at] for at in chosen]


def _fitted(label: str, size: float, inches: float) -> str:
    """The label cut to a width, its index kept."""
    text, mark, index = label.rpartition(_MARK)
    if not mark or not index.isdecimal():
        return fitted(label, size, inches)
    return fitted(text, size, max(inches - width_of(mark + index, size), 0.0)) + mark + index


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
        texts = shown if most_width is None else [_fitted(text, size, most_width) for text in shown]
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
    sides = [(side.skipped, name) for side, name in zip((rows, columns), names, strict=True)]
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

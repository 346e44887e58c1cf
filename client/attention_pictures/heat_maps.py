"""Heat maps of weights: one head, or a grid of heads that share a colour range."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from attention_contract.schemas.picture_options import PictureOptions
from attention_pictures import token_labels
from attention_pictures.colour_ranges import bar_label, colour_range, palette
from attention_pictures.figure_style import EDGE_IN, Sheet
from attention_pictures.pooled_cells import Numbers, cells_in, pool, pooling_note

MOST_HEADS: Final = 64
"""Heads of one grid."""
BAR_IN: Final = 0.78
_GAP_IN, _TITLE_IN, _AXIS_IN = 0.14, 0.2, 0.2
_MOST_WRITTEN: Final = 12
"""Rows and columns of a map whose cells have their numbers written in."""
_WRITTEN_IN: Final = 0.34


def heat_maps(
    weights: Numbers, titles: Sequence[str], heading: str, options: PictureOptions, *,
    keys: Sequence[str] | None = None, queries: Sequence[str] | None = None, signed: bool = False,
    axes_names: tuple[str, str] = ("query", "key"), quantity: str = "weight",
    pooled: int = 1,
) -> Figure:  # fmt: skip
    """Draw ``weights [maps, Lq, Lk]`` as heat maps, queries down and keys across, under these titles.

    ``keys`` and ``queries`` are labels of columns and rows, ``axes_names`` those of the axes. ``signed``: the numbers
    are differences; their colours diverge from 0. ``pooled``: the tokens of a row and of a column, if they are pooled
    before.
    """
    left_out = len(weights) - MOST_HEADS
    weights, titles = weights[:MOST_HEADS], list(titles[:MOST_HEADS])
    count, rows, columns = weights.shape
    across = columns_of(count)
    down = math.ceil(count / across)
    small = 7.0 if count == 1 else 6.0
    width = options.width / options.dpi
    left = _label_room(queries, rows * pooled, small, width)
    side = (width - left - BAR_IN - EDGE_IN - _GAP_IN * (across - 1)) / across
    height = side * min(max(rows / max(columns, 1), 0.12), 1.6)
    if count == 1:
        height = min(height, 0.7 * width)
    key_ticks = token_labels.ticks(keys, columns * pooled, pooled, side, across=True, size=small)
    below = key_ticks.depth + _AXIS_IN
    shown, factors = pool(weights, (cells_in(height, options.dpi), cells_in(side, options.dpi)), signed=signed)
    factors = factors[0] * pooled, factors[1] * pooled
    notes = pooling_note(factors, axes_names, signed=signed)
    if left_out > 0:
        notes.append(f"{left_out} heads are left out: a grid has {MOST_HEADS}; select others")
    sheet = Sheet(options, heading, notes, down * (height + _TITLE_IN) + below + _GAP_IN)
    norm, colours = colour_range(shown, options.scale, signed=signed), palette(options, signed=signed)
    row_ticks = token_labels.ticks(queries, rows * pooled, factors[0], height, across=False, size=small)
    column_ticks = token_labels.ticks(keys, columns * pooled, factors[1], side, across=True, size=small)
    for at, (cells, title) in enumerate(zip(shown, titles, strict=True)):
        row, column = divmod(at, across)
        axes = sheet.axes(left + column * (side + _GAP_IN), _TITLE_IN + row * (height + _TITLE_IN), side, height)
        axes.imshow(cells, norm=norm, cmap=colours, interpolation="none", aspect="auto")
        axes.set_title(title)
        last = at + across >= count
        token_labels.put(axes, row_ticks if column == 0 else None, column_ticks if last else None)
        if column == 0:
            axes.set_ylabel(axes_names[0])
        if last:
            axes.set_xlabel(axes_names[1])
        if count == 1 and factors == (1, 1):
            _write_numbers(axes, cells, norm, colours, (side, height))
    tall = min(down * (height + _TITLE_IN) - _TITLE_IN, 3.2)
    bar(sheet, norm, colours, bar_label(quantity, norm), (_TITLE_IN, tall))
    return sheet.figure


def columns_of(count: int) -> int:
    """The columns of a grid of so many maps: about as many as rows, and full rows if near."""
    least = math.ceil(math.sqrt(count))
    return count if count <= 4 else next((n for n in (least, least + 1) if count % n == 0), least)


def _label_room(labels: Sequence[str] | None, tokens: int, size: float, width: float) -> float:
    """Inches left of the first column: the labels of queries and the name of the axis."""
    texts = [str(tokens)] if labels is None else [token_labels.readable(label) for label in labels]
    longest = max((token_labels.width_of(text, size) for text in sorted(texts, key=len)[-8:]), default=0.0)
    return min(longest, 0.3 * width) + 0.1 + _AXIS_IN + EDGE_IN


def bar(sheet: Sheet, norm: Normalize, colours: Any, label: str, place: tuple[float, float]) -> None:
    """Draw the colour bar at the right edge, at this distance from the heading and of this height, in inches."""
    top, height = place
    axes = sheet.axes(sheet.width - BAR_IN + 0.1, top, 0.12, max(height, 0.5))
    drawn = sheet.figure.colorbar(ScalarMappable(norm, colours), cax=axes)
    drawn.formatter = FuncFormatter(lambda value, _: f"{value:.3g}")
    if isinstance(norm, SymLogNorm):
        top, least = float(norm.vmax or 1), float(norm.linthresh)
        drawn.locator = FixedLocator([-top, -((top * least) ** 0.5), 0, (top * least) ** 0.5, top])
    elif type(norm) is Normalize:
        drawn.locator = MaxNLocator(5)
    drawn.ax.yaxis.set_minor_locator(NullLocator())
    drawn.update_ticks()
    drawn.ax.tick_params(labelsize=6)
    drawn.outline.set_linewidth(0.4)
    drawn.set_label(label, fontsize=7, labelpad=2)


def _write_numbers(axes: Axes, cells: Numbers, norm: Normalize, colours: Any, size: tuple[float, float]) -> None:
    """Write each number into its cell, where all of them fit."""
    rows, columns = cells.shape
    if max(rows, columns) > _MOST_WRITTEN or size[0] / columns < _WRITTEN_IN or size[1] / rows < _WRITTEN_IN / 2:
        return
    for (row, column), value in np.ndenumerate(cells):
        if np.isfinite(value):
            write_number(axes, (column, row), float(value), colours(norm(value)))


def write_number(axes: Axes, place: tuple[float, float], value: float, ground: tuple[float, ...]) -> None:
    """Write a number over a colour, dark on a light one."""
    red, green, blue = ground[:3]
    light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.55
    text = "0" if value == 0 else f"{value:.2g}" if abs(value) < 0.01 or abs(value) >= 100 else f"{value:.2f}"
    axes.text(*place, text, ha="center", va="center", fontsize=6, color="#111111" if light else "#ffffff")

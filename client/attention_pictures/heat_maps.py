"""Heat maps of weights: one head, or a grid of heads that share a colour range."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from attention_contract.schemas.picture_options import PictureOptions, Scale
from attention_pictures import token_labels
from attention_pictures.cells import draw_cells
from attention_pictures.colour_ranges import bar_label, colour_range, palette
from attention_pictures.figure_style import EDGE_IN, GROUND, Sheet
from attention_pictures.pooled_cells import Numbers, cells_in, pool, pooling_note
from attention_pictures.text_sizes import widest, width_of, wrapped

MOST_HEADS: Final = 64
"""Heads of one grid."""
BAR_IN: Final = 0.78
_GAP_IN, _TITLE_IN, _AXIS_IN = 0.12, 0.2, 0.18
_BESIDE_IN: Final = 0.1 + 0.2 + EDGE_IN
"""Left of a map, beside its labels: ticks, the axis's name and the edge."""
_LEAST_IN, _LEAST_LABEL_IN = 0.36, 0.45
_TITLE_SIZE: Final = 7.0
_LINE_IN: Final = 0.12
"""Inches of a line of the label of a colour bar."""
_HALF: Final = 0.62
"""The share of a label that a line of two has at most."""
_MOST_WRITTEN: Final = 12
"""Rows and columns of a map whose cells have their numbers written in."""
_WRITTEN_IN: Final = 0.26


def heat_maps(
    weights: Numbers, titles: Sequence[str], heading: str, options: PictureOptions, *,
    keys: Sequence[str] | None = None, queries: Sequence[str] | None = None, signed: bool = False,
    axes_names: tuple[str, str] = ("query", "key"), quantity: str = "attention weight",
    pooled: int = 1, scale: Scale | None = None, ranged: Numbers | None = None,
    rules: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> Figure:  # fmt: skip
    """Draw ``weights [maps, Lq, Lk]`` as heat maps, queries down and keys across, under these titles.

    ``keys`` and ``queries`` are labels of columns and rows, ``axes_names`` those of the axes. ``signed``: the numbers
    are differences; their colours diverge from 0. ``pooled``: the tokens of a row and of a column, if they are pooled
    before. ``scale`` takes the place of the options' one; ``ranged`` are the numbers that the colours range over, if
    they are others. ``rules``: the rows and the columns before which a line is drawn.
    """
    left_out = len(weights) - MOST_HEADS
    weights, titles = weights[:MOST_HEADS], list(titles[:MOST_HEADS])
    count, rows, columns = weights.shape
    size = 7.0 if count == 1 else 6.0
    width = options.inches
    left = _label_width(queries, rows * pooled, size, width)
    maps_width = width - left - BAR_IN - EDGE_IN
    across = columns_within(count, maps_width, max(widest(titles, _TITLE_SIZE) - 0.04, _LEAST_IN), _GAP_IN)
    down = math.ceil(count / across)
    side = (maps_width - _GAP_IN * (across - 1)) / across
    height = side * min(max(rows / max(columns, 1), 0.12), 1.6)
    if count == 1:
        height = min(height, 0.7 * width)
    most = cells_in(height, options.resolution), cells_in(side, options.resolution)
    shown, factors = pool(weights, most, signed=signed)
    factors = factors[0] * pooled, factors[1] * pooled
    row_ticks = token_labels.ticks(
        queries, rows * pooled, factors[0], height, across=False, size=size, most_width=left - _BESIDE_IN,
    )  # fmt: skip
    column_ticks = token_labels.ticks(keys, columns * pooled, factors[1], side, across=True, size=size)
    notes = pooling_note(factors, axes_names, signed=signed)
    notes += token_labels.skipping_note(row_ticks, column_ticks, axes_names)
    if left_out > 0:
        notes.append(f"{left_out} heads are left out: a grid has {MOST_HEADS}; select others")
    norm = colour_range(shown if ranged is None else ranged, scale or options.scale, signed=signed)
    colours, label = palette(options, signed=signed), bar_label(quantity, norm)
    maps_in = down * (height + _TITLE_IN) - _TITLE_IN
    tall = max(min(maps_in, 3.2), bar_height(label))
    body = _TITLE_IN + max(maps_in + column_ticks.depth + _AXIS_IN, tall) + _GAP_IN
    sheet = Sheet(options, heading, notes, body)
    for at, (cells, title) in enumerate(zip(shown, titles, strict=True)):
        row, column = divmod(at, across)
        axes = sheet.axes(left + column * (side + _GAP_IN), _TITLE_IN + row * (height + _TITLE_IN), side, height)
        draw_cells(axes, cells, norm, colours, total=shown.size)
        axes.set_title(title, fontsize=_TITLE_SIZE)
        token_labels.put(axes, row_ticks if column == 0 else None, column_ticks if at + across >= count else None)
        for places, line in ((rules[0], axes.axhline), (rules[1], axes.axvline)):
            for place in places:
                line(place / pooled - 0.5, color=GROUND[options.theme], linewidth=0.6)
        if count == 1 and factors == (1, 1):
            write_numbers(axes, cells, norm, colours, (side, height))
    grid = left, _TITLE_IN, width - left - BAR_IN - EDGE_IN, maps_in
    sheet.name_axes(axes_names, grid, column_ticks.depth)
    bar(sheet, norm, colours, label, (_TITLE_IN, tall))
    return sheet.figure


def columns_of(count: int) -> int:
    """The columns of a grid of so many maps: about as many as rows, and full rows if near."""
    least = math.ceil(math.sqrt(count))
    return count if count <= 4 else next((n for n in (least, least + 1) if count % n == 0), least)


def columns_within(count: int, width: float, least: float, gap: float) -> int:
    """The columns of a grid of this width whose maps have at least this width, all in inches."""
    most = max(1, int((width + gap) / (least + gap)))
    across = min(columns_of(count), most)
    return math.ceil(count / math.ceil(count / across))


def _label_width(labels: Sequence[str] | None, tokens: int, size: float, width: float) -> float:
    """Inches left of the first column: the labels of queries, cut to 18 % of the picture, and the axis's name."""
    texts = [str(tokens)] if labels is None else [token_labels.readable(label) for label in labels]
    return min(widest(texts, size), max(0.18 * width, _LEAST_LABEL_IN)) + _BESIDE_IN


def bar_height(label: str) -> float:
    """The least height of a colour bar with this label, which may take two lines, in inches."""
    whole = width_of(label, 7)
    return max(widest(wrapped(label, 7, max(_HALF * whole, 0.8)), 7) + 0.04, 0.8)


def bar(sheet: Sheet, norm: Normalize, colours: Any, label: str, place: tuple[float, float]) -> None:
    """Draw the colour bar at the right edge, at this distance from the heading and of this height, in inches."""
    axes = sheet.axes(sheet.width - BAR_IN + 0.08, place[0], 0.12, place[1])
    draw_bar(axes, ScalarMappable(norm, colours), place[1])
    for at, line in enumerate(reversed(wrapped(label, 7, place[1]))):
        left = sheet.width - EDGE_IN / 2 - at * _LINE_IN
        sheet.write(line, left, place[0] + place[1] / 2, rotation=90, va="center", ha="right", fontsize=7)


def draw_bar(axes: Axes, of: ScalarMappable, height: float) -> None:
    """Fill these axes, so many inches high, with the colour bar of what is drawn elsewhere."""
    drawn = axes.figure.colorbar(of, cax=axes)
    norm: Any = of.norm
    digits = 2 if isinstance(norm, SymLogNorm) else 3
    drawn.formatter = FuncFormatter(lambda value, _: f"{value:.{digits}g}".replace("e-0", "e-"))
    if isinstance(norm, SymLogNorm):
        top, least = float(norm.vmax or 1), float(norm.linthresh)
        drawn.locator = FixedLocator([-top, -((top * least) ** 0.5), 0, (top * least) ** 0.5, top])
    elif isinstance(norm, LogNorm):
        drawn.locator = LogLocator(numticks=5)
    else:
        drawn.locator = MaxNLocator(max(2, min(5, int(height / 0.2))))
    drawn.minorlocator = NullLocator()
    drawn.update_ticks()
    drawn.ax.tick_params(labelsize=6)
    drawn.outline.set_linewidth(0.4)


def write_numbers(axes: Axes, cells: Numbers, norm: Normalize, colours: Any, size: tuple[float, float]) -> None:
    """Write each number into its cell, where all of them fit."""
    rows, columns = cells.shape
    if max(rows, columns) > _MOST_WRITTEN or size[1] / rows < _WRITTEN_IN / 2:
        return
    if number_width(cells) > size[0] / columns:
        return
    for (row, column), value in np.ndenumerate(cells):
        if np.isfinite(value):
            write_number(axes, (column, row), float(value), colours(norm(value)))


def number_width(cells: Numbers) -> float:
    """The inches that the widest of these numbers takes."""
    return max(widest([number(float(value)) for value in cells.ravel() if np.isfinite(value)], 6) + 0.06, _WRITTEN_IN)


def number(value: float) -> str:
    """A number as it is written into a cell."""
    return "0" if value == 0 else f"{value:.2g}" if abs(value) < 0.01 or abs(value) >= 100 else f"{value:.2f}"


def write_number(axes: Axes, place: tuple[float, float], value: float, ground: tuple[float, ...]) -> None:
    """Write a number over a colour, dark on a light one."""
    write_cell(axes, place, number(value), ground)


def write_cell(axes: Axes, place: tuple[float, float], text: str, ground: tuple[float, ...]) -> None:
    """Write a short text over a colour, dark on a light one."""
    red, green, blue = ground[:3]
    light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.55
    axes.text(*place, text, ha="center", va="center", fontsize=6, color="#111111" if light else "#ffffff")

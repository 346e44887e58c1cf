"""Statistics of heads: a table of heads × statistics, or a map of layers × heads for each statistic."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from attention_contract.schemas.picture_options import PictureOptions
from attention_pictures import token_labels
from attention_pictures.cells import draw_cells
from attention_pictures.colour_ranges import colour_range, palette
from attention_pictures.figure_style import EDGE_IN, Sheet
from attention_pictures.heat_maps import draw_bar, number, number_width, write_number, write_numbers
from attention_pictures.pooled_cells import Numbers
from attention_pictures.sign_colours import DIVERGING_SCALES
from attention_pictures.statistic_tables import measured
from attention_pictures.text_sizes import widest

_ROW_IN, _TITLE_IN, _AXIS_IN, _BAR_IN, _GAP_IN = 0.19, 0.22, 0.2, 0.5, 0.2
MOST_ROWS: Final = 256
_LEAST_IN: Final = 0.5
"""The least width of a map."""
_COLUMNS: Final = 3


def head_table(
    statistics: Mapping[str, Numbers], heads: Sequence[str], heading: str, options: PictureOptions, *,
    signed: bool = False, rows_name: str = "head",
) -> Figure:  # fmt: skip
    """Draw statistics ``[H]`` by name as a table of heads × statistics, each column with its own range; one as bars."""
    names = list(statistics)
    values = np.stack([np.asarray(statistics[name], np.float64) for name in names], -1)[:MOST_ROWS]
    if len(names) == 1:
        return _bars(values[:, 0], measured(names[0]), heads, heading, options, rows_name, signed=signed)
    notes = ["each column has its own colour range, from its least to its largest number"]
    if signed:
        notes = ["each column has its own colour range, which diverges from 0"]
    notes += left_out(len(heads), "heads")
    heads = list(heads[:MOST_ROWS])
    width, height = options.inches, max(len(heads) * _ROW_IN, 0.3)
    row_ticks = token_labels.ticks(heads, len(heads), 1, height, across=False)
    left = row_ticks.depth + _AXIS_IN + EDGE_IN
    side = width - left - 2 * EDGE_IN
    column_ticks = token_labels.ticks([measured(name) for name in names], len(names), 1, side, across=True)
    notes += token_labels.skipping_note(row_ticks, column_ticks, (rows_name, "column"))
    sheet = Sheet(options, heading, notes, height + column_ticks.depth + 0.2)
    axes = sheet.axes(left, 0.05, side, height)
    places = _column_places(values, signed=signed)
    colours = palette(options, signed=signed)
    draw_cells(axes, places, Normalize(0, 1), colours, total=places.size)
    token_labels.put(axes, row_ticks, column_ticks)
    sheet.name_axes((rows_name, ""), (left, 0.05, side, height), 0)
    if number_width(values) <= side / len(names):
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                write_number(axes, (column, row), float(value), colours(float(places[row, column])))
    return sheet.figure


def _bars(
    values: Numbers, name: str, labels: Sequence[str], heading: str, options: PictureOptions, rows_name: str, *,
    signed: bool,
) -> Figure:  # fmt: skip
    """Draw one number of each head as a bar, with the number at its end. Of signed ones the colour says the sign."""
    notes, labels = left_out(len(labels), "heads"), list(labels[:MOST_ROWS])
    width, height = options.inches, max(len(labels) * _ROW_IN, 0.3)
    row_ticks = token_labels.ticks(labels, len(labels), 1, height, across=False)
    left = row_ticks.depth + _AXIS_IN + EDGE_IN
    number_in = number_width(values)
    side = width - left - 2 * EDGE_IN
    sheet = Sheet(options, heading, notes, height + 0.45)
    axes = sheet.axes(left, 0.05, side, height)
    shown = np.nan_to_num(values)
    axes.barh(range(len(labels)), shown, height=0.72, color=_bar_colours(shown, options, signed=signed))
    low, high = min(0.0, float(shown.min(initial=0))), max(0.0, float(shown.max(initial=0)))
    per_inch = ((high - low) or 1.0) / max(side - number_in * ((low < 0) + (high > 0)) - 0.1, 0.1)
    axes.set_xlim(low - number_in * per_inch * (low < 0), max(high, per_inch * 0.1) + number_in * per_inch)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    for row, value in enumerate(values):
        if np.isfinite(value):
            end, side_of = (value - 0.03 * per_inch, "right") if value < 0 else (value + 0.03 * per_inch, "left")
            axes.text(end, row, number(float(value)), ha=side_of, va="center", fontsize=6)
    token_labels.put(axes, row_ticks, None)
    axes.xaxis.set_major_locator(MaxNLocator(max(2, min(6, int(side / 0.5)))))
    axes.spines[["top", "right"]].set_visible(False)
    sheet.name_axes((rows_name, name), (left, 0.05, side, height), 0.17)
    return sheet.figure


def _bar_colours(values: Numbers, options: PictureOptions, *, signed: bool) -> Any:
    """One colour for all bars; of signed numbers those of negative and of positive ones."""
    if not signed and not (values < 0).any():
        return palette(options)(0.45 if options.theme == "light" else 0.7)
    negative, _, positive = ([part / 255 for part in colour] for colour in DIVERGING_SCALES[options.theme])
    return [negative if value < 0 else positive for value in values]


def layer_maps(
    statistics: Mapping[str, Numbers], layers: Sequence[str], heads: Sequence[str], heading: str,
    options: PictureOptions, notes: Sequence[str] = (),
) -> Figure:  # fmt: skip
    """Draw statistics ``[layers, heads]`` by name, each as a map with its own colour range. NaN: no such head."""
    width = options.inches
    rows = max(min(max(len(layers) * _ROW_IN, 0.5), 4.0), 0.5)
    layer_ticks = token_labels.ticks(layers, len(layers), 1, rows, across=False, size=6, most_width=0.3 * width)
    left = layer_ticks.depth + EDGE_IN
    least = max(widest([measured(name) for name in statistics], 8) - 0.3, _LEAST_IN)
    across = min(_COLUMNS, len(statistics), max(1, int(width / (left + _BAR_IN + _GAP_IN + least))))
    down = math.ceil(len(statistics) / across)
    side = (width - (left + _BAR_IN + _GAP_IN) * across) / across
    head_ticks = token_labels.ticks(heads, len(heads), 1, side, across=True, size=6)
    pitch = rows + _TITLE_IN + head_ticks.depth + _AXIS_IN
    ranges = ["each map has its own colour range"] if len(statistics) > 1 else []
    skipped = token_labels.skipping_note(layer_ticks, head_ticks, ("layer", "head"))
    sheet = Sheet(options, heading, [*ranges, *notes, *skipped], pitch * down)
    total = sum(values.size for values in statistics.values())
    for at, (name, values) in enumerate(statistics.items()):
        row, column = divmod(at, across)
        begin, top = column * (left + side + _BAR_IN + _GAP_IN) + left, row * pitch + _TITLE_IN
        axes = sheet.axes(begin, top, side, rows)
        signed = bool(np.nanmin(values, initial=0.0) < 0)
        norm = colour_range(values, options.scale, signed=signed)
        drawn = draw_cells(axes, values, norm, palette(options, signed=signed), total=total)
        write_numbers(axes, values, norm, palette(options, signed=signed), (side, rows))
        axes.set_title(measured(name))
        token_labels.put(axes, layer_ticks, head_ticks)
        sheet.write("head", begin + side / 2, top + rows + head_ticks.depth + 0.02, ha="center")
        draw_bar(sheet.axes(begin + side + 0.06, top, 0.09, rows), drawn, rows)
    return sheet.figure


def left_out(count: int, nouns: str) -> list[str]:
    """A note on those of so many things that a picture has no row, column or line for; none if all have one."""
    return [f"{count - MOST_ROWS} {nouns} are left out: a picture has {MOST_ROWS}"] if count > MOST_ROWS else []


def _column_places(values: Numbers, *, signed: bool) -> Numbers:
    """Each number's place, from 0 to 1, in the range of its column."""
    with np.errstate(all="ignore"):
        if signed:
            most = np.nanmax(np.abs(values), axis=0, initial=0.0)
            return 0.5 + 0.5 * values / np.where(most > 0, most, 1)
        least, most = np.nanmin(values, axis=0, initial=np.inf), np.nanmax(values, axis=0, initial=-np.inf)
        wide = np.where(most > least, most - least, 1)
        return np.where(np.isfinite(values), (values - least) / wide, np.nan)

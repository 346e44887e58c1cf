"""Statistics of heads: a table of heads × statistics, or a map of layers × heads for each statistic."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from attention_contract.schemas.picture_options import PictureOptions
from attention_pictures import token_labels
from attention_pictures.colour_ranges import colour_range, palette
from attention_pictures.figure_style import EDGE_IN, Sheet, spaced
from attention_pictures.heat_maps import write_number
from attention_pictures.pooled_cells import Numbers

_ROW_IN, _TITLE_IN, _AXIS_IN, _BAR_IN, _GAP_IN = 0.19, 0.22, 0.2, 0.5, 0.2
MOST_ROWS: Final = 256
_WRITTEN_IN: Final = 0.3
_COLUMNS: Final = 3


def head_table(
    statistics: Mapping[str, Numbers], heads: Sequence[str], heading: str, options: PictureOptions, *,
    signed: bool = False, rows_name: str = "head",
) -> Figure:  # fmt: skip
    """Draw statistics ``[H]`` by name as a table of heads × statistics, whose columns have ranges of their own."""
    names = list(statistics)
    values = np.stack([np.asarray(statistics[name], np.float64) for name in names], -1)[:MOST_ROWS]
    notes = ["each column has its own colour range, from its least to its largest number"]
    if signed:
        notes = ["each column has its own colour range, which diverges from 0"]
    notes += left_out(len(heads), "heads")
    heads = list(heads[:MOST_ROWS])
    width, height = options.width / options.dpi, max(len(heads) * _ROW_IN, 0.3)
    row_ticks = token_labels.ticks(heads, len(heads), 1, height, across=False)
    left = row_ticks.depth + _AXIS_IN + EDGE_IN
    side = width - left - 2 * EDGE_IN
    column_ticks = token_labels.ticks([spaced(name) for name in names], len(names), 1, side, across=True)
    sheet = Sheet(options, heading, notes, height + column_ticks.depth + 0.2)
    axes = sheet.axes(left, 0.05, side, height)
    places = _column_places(values, signed=signed)
    colours = palette(options, signed=signed)
    axes.imshow(places, vmin=0, vmax=1, cmap=colours, interpolation="none", aspect="auto")
    token_labels.put(axes, row_ticks, column_ticks)
    axes.set_ylabel(rows_name)
    if side / len(names) >= _WRITTEN_IN:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                write_number(axes, (column, row), float(value), colours(float(places[row, column])))
    return sheet.figure


def layer_maps(
    statistics: Mapping[str, Numbers], layers: Sequence[str], heads: Sequence[str], heading: str,
    options: PictureOptions, notes: Sequence[str] = (),
) -> Figure:  # fmt: skip
    """Draw statistics ``[layers, heads]`` by name, each as a map with its own colour range. NaN: no such head."""
    across = min(_COLUMNS, len(statistics))
    down = math.ceil(len(statistics) / across)
    width = options.width / options.dpi
    rows = min(max(len(layers) * _ROW_IN, 0.5), 4.0)
    layer_ticks = token_labels.ticks(layers, len(layers), 1, rows, across=False, size=6)
    left = layer_ticks.depth + EDGE_IN
    side = max((width - (left + _BAR_IN + _GAP_IN) * across) / across, 0.4)
    head_ticks = token_labels.ticks(heads, len(heads), 1, side, across=True, size=6)
    pitch = rows + _TITLE_IN + head_ticks.depth + _AXIS_IN
    ranges = ["each map has its own colour range"] if len(statistics) > 1 else []
    sheet = Sheet(options, heading, [*ranges, *notes], pitch * down)
    for at, (name, values) in enumerate(statistics.items()):
        row, column = divmod(at, across)
        begin, top = column * (left + side + _BAR_IN + _GAP_IN) + left, row * pitch + _TITLE_IN
        axes = sheet.axes(begin, top, side, rows)
        signed = bool(np.nanmin(values, initial=0.0) < 0)
        norm = colour_range(values, options.scale, signed=signed)
        colours = palette(options, signed=signed)
        drawn = axes.imshow(values, norm=norm, cmap=colours, interpolation="none", aspect="auto")
        axes.set_title(spaced(name))
        axes.set_xlabel("head")
        token_labels.put(axes, layer_ticks, head_ticks)
        scale = sheet.figure.colorbar(drawn, cax=sheet.axes(begin + side + 0.06, top, 0.09, rows))
        scale.ax.tick_params(labelsize=6)
        scale.outline.set_linewidth(0.4)
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

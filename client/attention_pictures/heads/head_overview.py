"""The weights of every head of a model in one figure: a row of maps for each layer, a column for each head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from attention_contract.schemas.picture_options import PictureOptions
from attention_pictures import token_labels
from attention_pictures.cells import draw_cells
from attention_pictures.colour_ranges import bar_label, colour_range, palette, scale_of
from attention_pictures.figure_style import EDGE_IN, SECOND, Sheet
from attention_pictures.heat_maps import BAR_IN, bar, bar_height
from attention_pictures.pooled_cells import Numbers, cells_in, pool, pooling_note

MOST_LAYERS, MOST_COLUMNS = 64, 64
"""Layers, and heads of a layer, of one figure."""
_TOP_IN, _AXIS_IN, _GAP_IN, _NARROW_GAP_IN = 0.18, 0.2, 0.06, 0.02
_MOST_IN: Final = 1.4
"""The width of a map, of which there may be few."""
_NARROW_IN: Final = 0.3
"""The width of a map below which the gaps are narrow."""
_SIZE: Final = 6.0


@dataclass(frozen=True)
class LayerMaps:
    """The weights ``[maps, Lq, Lk]`` of one layer, each with the column that it stands in."""

    name: str
    maps: Numbers
    columns: Sequence[int]


def head_overview(
    layers: Sequence[LayerMaps], columns: Sequence[str], heading: str, options: PictureOptions, *, quantity: str,
    signed: bool,
) -> Figure:  # fmt: skip
    """Draw the maps of all layers with one range of colours, queries down and keys across. ``columns``: their names."""
    notes = ["each map has the queries down and the keys across"]
    notes += _left_out(len(layers), MOST_LAYERS, "layers") + _left_out(len(columns), MOST_COLUMNS, "heads of a layer")
    layers, columns = layers[:MOST_LAYERS], columns[:MOST_COLUMNS]
    rows_in = len(layers) * 0.2
    left_in = token_labels.ticks([layer.name for layer in layers], len(layers), 1, rows_in, across=False, size=_SIZE,
                                 most_width=0.18 * options.inches).depth + _AXIS_IN + EDGE_IN  # fmt: skip
    room = options.inches - left_in - BAR_IN - EDGE_IN
    gap = _GAP_IN if room / len(columns) > _NARROW_IN else _NARROW_GAP_IN
    side = min((room - gap * (len(columns) - 1)) / len(columns), _MOST_IN)
    shapes = [layer.maps.shape[-2:] for layer in layers]
    height = side * min(max(0.25, *(rows / max(keys, 1) for rows, keys in shapes)), 1.6)
    size = len(columns) * (side + gap) - gap, len(layers) * (height + gap) - gap
    row_ticks = token_labels.ticks([layer.name for layer in layers], len(layers), 1, size[1], across=False, size=_SIZE,
                                   most_width=0.18 * options.inches)  # fmt: skip
    column_ticks = token_labels.ticks(columns, len(columns), 1, size[0], across=True, size=_SIZE)
    most = cells_in(height, options.resolution), cells_in(side, options.resolution)
    pooled = [pool(layer.maps, most, signed=signed) for layer in layers]
    largest = max((factors for _, factors in pooled), default=(1, 1))
    notes += pooling_note(largest, signed=signed)
    notes += token_labels.skipping_note(row_ticks, column_ticks, ("layer", "head"))
    every = np.concatenate([cells.ravel() for cells, _ in pooled])
    norm = colour_range(every, scale_of(options.scale, max(keys for _, keys in shapes)), signed=signed)
    colours, label = palette(options, signed=signed), bar_label(quantity, norm)
    tall = max(min(size[1], 3.2), bar_height(label))
    top = _TOP_IN + column_ticks.depth
    sheet = Sheet(options, heading, notes, top + max(size[1], tall) + 2 * EDGE_IN)
    axes = sheet.axes(left_in, top, *size)
    placed = [
        (one, (column * (side + gap), row * (height + gap)))
        for row, (layer, (cells, _)) in enumerate(zip(layers, pooled, strict=True))
        for column, one in zip(layer.columns, cells, strict=True)
        if column < len(columns)
    ]
    for one, corner in placed:
        draw_cells(axes, one, norm, colours, total=every.size, place=(*corner, side, height))
    frames = [Rectangle(corner, side, height) for _, corner in placed]
    axes.add_collection(
        PatchCollection(
            frames, facecolor="none", edgecolor=SECOND[options.theme], linewidth=0.3, zorder=3, clip_on=False
        )
    )
    _label(axes, row_ticks, column_ticks, (side + gap, side), (height + gap, height), size)
    sheet.write("layer", EDGE_IN, top + size[1] / 2, rotation=90, va="center")
    sheet.write("head", left_in + size[0] / 2, 0.03, ha="center")
    bar(sheet, norm, colours, label, (top, tall))
    return sheet.figure


def _label(
    axes: Axes, rows: token_labels.Ticks, columns: token_labels.Ticks, across: tuple[float, float],
    down: tuple[float, float], size: tuple[float, float],
) -> None:  # fmt: skip
    """Write the layers at the left and the heads above; ``across`` and ``down``: a step of the grid, and a map."""
    axes.set(xlim=(0, size[0]), ylim=(size[1], 0))
    axes.xaxis.tick_top()
    axes.set_xticks(
        [place * across[0] + across[1] / 2 for place in columns.places], columns.texts,
        rotation=90 if columns.rotated else 0, fontsize=columns.size,
    )  # fmt: skip
    axes.set_yticks([place * down[0] + down[1] / 2 for place in rows.places], rows.texts, fontsize=rows.size)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.patch.set_visible(False)


def _left_out(count: int, most: int, nouns: str) -> list[str]:
    return [f"{count - most} {nouns} are left out: a picture has {most}"] if count > most else []

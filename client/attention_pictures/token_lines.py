"""Weights of one head as lines from query tokens to key tokens. Source: Vig 2019 (BertViz)."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize, to_rgba
from matplotlib.figure import Figure

from attention_contract.schemas.picture_options import PictureOptions
from attention_pictures import token_labels
from attention_pictures.colour_ranges import colour_range, palette
from attention_pictures.figure_style import Sheet
from attention_pictures.pooled_cells import Numbers, pool, pooling_note

_MOST_TOKENS: Final = 64
"""Places a side; more tokens are pooled."""
_MOST_LINES: Final = 1024
_ROW_IN: Final = 0.16
_FAINTEST: Final = 0.03
_AXIS_IN: Final = 0.2


def token_lines(
    weights: Numbers, heading: str, options: PictureOptions, *,
    keys: Sequence[str] | None = None, queries: Sequence[str] | None = None, signed: bool = False,
    pooled: int = 1,
) -> Figure:  # fmt: skip
    """Draw ``weights [Lq, Lk]``: a line for each weight, the more opaque the larger; queries left, keys right.

    ``pooled``: the tokens of a row and of a column, if they are pooled before.
    """
    rows, columns = weights.shape
    cells, factors = pool(weights, (_MOST_TOKENS, _MOST_TOKENS), signed=signed)
    factors = factors[0] * pooled, factors[1] * pooled
    notes = pooling_note(factors, signed=signed)
    norm = colour_range(cells, options.scale, signed=signed)
    strengths = _strengths(cells, norm, signed=signed)
    order = np.argsort(strengths, axis=None, kind="stable")
    order = order[strengths.ravel()[order] > 0]
    if len(order) > _MOST_LINES:
        notes.append(f"the {_MOST_LINES} largest of {len(order)} lines are drawn")
        order = order[-_MOST_LINES:]
    most = max(cells.shape)
    height = most * min(max(_ROW_IN, 0.4 * options.width / options.dpi / most), 2 * _ROW_IN) + 0.1
    query_ticks = token_labels.ticks(queries, rows * pooled, factors[0], height, across=False)
    key_ticks = token_labels.ticks(keys, columns * pooled, factors[1], height, across=False)
    sheet = Sheet(options, heading, notes, height + _AXIS_IN + 0.1)
    left, right = query_ticks.depth + _AXIS_IN + 0.1, key_ticks.depth + _AXIS_IN + 0.1
    axes = sheet.axes(left, _AXIS_IN, max(sheet.width - left - right, 0.5), height)
    axes.add_collection(_lines(cells, strengths, order, options, signed=signed))
    axes.set_xlim(0, 1)
    axes.set_ylim(cells.shape[0] - 0.5, -0.5)
    token_labels.put(axes, query_ticks, None)
    axes.set_ylabel("query")
    axes.spines[:].set_visible(False)
    other = _other_side(axes, cells.shape[1])
    token_labels.put(other, key_ticks, None)
    other.set_ylabel("key")
    return sheet.figure


def _other_side(axes: Axes, places: int) -> Axes:
    """Axes at the right edge, whose places are the keys."""
    other = axes.twinx()
    other.set_ylim(places - 0.5, -0.5)
    other.spines[:].set_visible(False)
    return other


def _strengths(cells: Numbers, norm: Normalize, *, signed: bool) -> Numbers:
    """The opacity of each line, from 0 to 1; 0 of no line."""
    placed = np.ma.filled(np.ma.masked_invalid(norm(np.nan_to_num(cells))), 0.0)
    strengths = np.abs(2 * placed - 1) if signed else placed
    return np.where(np.isfinite(cells) & (cells != 0), np.clip(strengths, _FAINTEST, 1), 0.0)


def _lines(
    cells: Numbers, strengths: Numbers, order: np.ndarray, options: PictureOptions, *, signed: bool
) -> LineCollection:
    """The lines in this order, the strongest last. A key's place is scaled to the queries' axis."""
    rows, columns = np.unravel_index(order, cells.shape)
    scaled = (columns + 0.5) * cells.shape[0] / cells.shape[1] - 0.5
    starts = np.stack([np.zeros(len(order)), rows.astype(float)], -1)
    ends = np.stack([np.ones(len(order)), scaled], -1)
    opacity = strengths.ravel()[order]
    colours = palette(options, signed=signed)
    middle = 0.45 if options.theme == "light" else 0.7
    colour = np.array([to_rgba(colours(middle))] * len(order)).reshape(-1, 4)
    if signed:
        colour = np.where((cells.ravel()[order] > 0)[:, None], to_rgba(colours(0.92)), to_rgba(colours(0.08)))
    colour[:, 3] = opacity
    return LineCollection(list(np.stack([starts, ends], 1)), colors=colour, linewidths=0.4 + 1.6 * opacity)

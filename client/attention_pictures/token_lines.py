"""Weights of one head as lines from query tokens to key tokens. Source: Vig 2019 (BertViz)."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import Normalize, to_rgba
from matplotlib.figure import Figure
from matplotlib.path import Path

from attention_contract.schemas.picture_options import PictureOptions, Scale
from attention_pictures import token_labels
from attention_pictures.colour_ranges import colour_range, palette
from attention_pictures.figure_style import EDGE_IN, Sheet
from attention_pictures.pooled_cells import Numbers, pool, pooling_note

_MOST_TOKENS: Final = 64
"""Places a side; more tokens are pooled."""
_MOST_LINES: Final = 1024
_ROW_IN: Final = 0.16
_FAINTEST: Final = 0.08
_LEAST_SHARE: Final = 0.05
"""The size of the smallest line, as a share of the largest."""
_BEND: Final = 0.375
"""The reach of a curve's handles, as a share of the width."""
_AXIS_IN: Final = 0.2
_LABEL_SHARE: Final = 0.32
"""The share of the width that the labels of a side have at most."""


def token_lines(
    weights: Numbers, heading: str, options: PictureOptions, *,
    keys: Sequence[str] | None = None, queries: Sequence[str] | None = None, signed: bool = False,
    pooled: int = 1, scale: Scale | None = None, ranged: Numbers | None = None,
    axes_names: tuple[str, str] = ("query", "key"), quantity: str = "attention weight",
) -> Figure:  # fmt: skip
    """Draw ``weights [Lq, Lk]``: a curve for each weight above the mean, the more opaque the larger; queries left.

    ``pooled``: the tokens of a row and of a column, if they are pooled before. ``scale``, ``ranged``,
    ``axes_names`` and ``quantity`` are those of ``heat_maps``.
    """
    rows, columns = weights.shape
    cells, factors = pool(weights, (_MOST_TOKENS, _MOST_TOKENS), signed=signed)
    factors = factors[0] * pooled, factors[1] * pooled
    notes = [f"opacity: {quantity}", *pooling_note(factors, axes_names, signed=signed)]
    norm = colour_range(cells if ranged is None else ranged, scale or options.scale, signed=signed)
    sizes = np.abs(np.where(np.isfinite(cells), cells, 0.0))
    least = max(float(sizes.mean()), _LEAST_SHARE * float(sizes.max(initial=0.0))) * (1 - 1e-6)
    drawn_pairs = np.flatnonzero((sizes >= least) & (sizes > 0))
    order = drawn_pairs[np.argsort(sizes.ravel()[drawn_pairs], kind="stable")][-_MOST_LINES:]
    if len(order) < (count := np.count_nonzero(sizes)):
        least = float(sizes.ravel()[order].min())
        size = "magnitude" if signed else "weight"
        notes.append(f"{len(order)} of {count} lines are drawn: those of at least {least:.2g} in {size}")
    most = max(cells.shape)
    height = most * min(max(_ROW_IN, 0.4 * options.inches / most), 2 * _ROW_IN) + 0.1
    most_width = (options.inches - 2 * (_AXIS_IN + EDGE_IN)) * _LABEL_SHARE
    query_ticks = token_labels.ticks(queries, rows * pooled, factors[0], height, across=False, most_width=most_width)
    key_ticks = token_labels.ticks(keys, columns * pooled, factors[1], height, across=False, most_width=most_width)
    notes += token_labels.skipping_note(query_ticks, key_ticks, axes_names)
    sheet = Sheet(options, heading, notes, height + 2 * _AXIS_IN)
    left, right = (ticks.depth + _AXIS_IN + EDGE_IN for ticks in (query_ticks, key_ticks))
    axes = sheet.axes(left, _AXIS_IN, sheet.width - left - right, height)
    axes.add_collection(_lines(cells, _strengths(cells, norm, signed=signed), order, options, signed=signed))
    axes.set_xlim(0, 1)
    axes.set_ylim(cells.shape[0] - 0.5, -0.5)
    token_labels.put(axes, query_ticks, None)
    axes.spines[:].set_visible(False)
    token_labels.put(_other_side(axes, cells.shape[1]), key_ticks, None)
    for name, place in zip(axes_names, (EDGE_IN, sheet.width - EDGE_IN - 0.14), strict=True):
        sheet.write(name, place, _AXIS_IN + height / 2, rotation=90, va="center")
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
) -> PathCollection:
    """The lines in this order, the strongest last. A key's place is scaled to the queries' axis."""
    rows, columns = np.unravel_index(order, cells.shape)
    scaled = (columns + 0.5) * cells.shape[0] / cells.shape[1] - 0.5
    opacity = strengths.ravel()[order]
    colours = palette(options, signed=signed)
    middle = 0.45 if options.theme == "light" else 0.7
    colour = np.array([to_rgba(colours(middle))] * len(order)).reshape(-1, 4)
    if signed:
        colour = np.where((cells.ravel()[order] > 0)[:, None], to_rgba(colours(0.92)), to_rgba(colours(0.08)))
    colour[:, 3] = opacity
    paths = [
        Path([(0, row), (_BEND, row), (1 - _BEND, key), (1, key)], [Path.MOVETO, *[Path.CURVE4] * 3])
        for row, key in zip(rows.astype(float), scaled, strict=True)
    ]
    return PathCollection(paths, edgecolors=colour, facecolors="none", linewidths=0.4 + 1.6 * opacity)

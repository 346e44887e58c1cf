"""Figures of circuits: singular values, the statistics of each head, and composition with a later module."""

import math

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from attention_contract.errors import InvalidRequest
from attention_contract.reply_names import Names, head_name, heading
from attention_contract.schemas.analyses.circuits import CircuitsReply
from attention_contract.schemas.picture_options import PictureOptions
from attention_pictures.colour_ranges import palette
from attention_pictures.figure_style import EDGE_IN, SECOND, Sheet
from attention_pictures.heat_maps import heat_maps
from attention_pictures.pooled_cells import Numbers
from attention_pictures.statistic_maps import MOST_ROWS, head_table, left_out

_HEIGHT_IN, _TITLE_IN, _LEFT_IN, _BELOW_IN, _LEGEND_IN = 2.4, 0.22, 0.55, 0.5, 1.35
_NARROW_IN = 4.5
"""The width below which the legend stands below its chart."""
_MOST_NAMED = 16
"""Lines of one chart that a legend names."""
_MIN_SINGULAR_VALUE = 1e-7
"""The smallest singular value that is drawn, as a share of the largest: float32 parameters have no smaller ones."""


def circuits_figure(reply: CircuitsReply, options: PictureOptions, names: Names) -> Figure:
    """Draw the view of circuits that the options name; ``spectra`` by default."""
    if options.view == "composition":
        return _composition(reply, options, names)
    return (_table if options.view == "statistics" else _spectra)(reply, options, names)


def _spectra(reply: CircuitsReply, options: PictureOptions, names: Names) -> Figure:
    """Draw singular values: of W_QK and W_OV a line for each head, of the parameters one for each."""
    charts: list[tuple[str, list[tuple[str, Numbers]]]] = []
    heads = [head_name(None, head) for head in np.atleast_1d(reply.heads)]
    for title, circuit in (("W_QK", reply.qk), ("W_OV", reply.ov)):
        if circuit is not None:
            charts.append((title, list(zip(heads, circuit.singular_values, strict=True))))
    parameters = [(one.name, np.atleast_2d(one.singular_values)[0]) for one in reply.spectra or []]
    parameters = [(name, values) for name, values in parameters if len(values) > 1]
    if parameters:
        charts.append(("parameters", parameters))
    if not charts:
        raise InvalidRequest.at("parts", "expected qk, ov or spectra, to draw singular values")
    pitch = _HEIGHT_IN + _TITLE_IN + _BELOW_IN
    notes = []
    notes += left_out(max(len(lines) for _, lines in charts), "lines of a chart")
    charts = [(title, lines[:MOST_ROWS]) for title, lines in charts]
    if any(len(lines) > _MOST_NAMED for _, lines in charts):
        notes.append(f"a legend names {_MOST_NAMED} lines of a chart; the colours run from its first to its last")
    width = options.inches
    narrow = width < _NARROW_IN
    columns = max(1, int((width - _LEFT_IN) / _LEGEND_IN)) if narrow else 1
    legend = 0.13 * math.ceil(min(max(len(lines) for _, lines in charts), _MOST_NAMED) / columns) * narrow
    pitch += legend
    sheet = Sheet(options, heading(names, "singular values of circuits and parameters"), notes, pitch * len(charts))
    for row, (title, lines) in enumerate(charts):
        side = width - _LEFT_IN - 2 * EDGE_IN if narrow else width - _LEFT_IN - _LEGEND_IN - EDGE_IN
        axes = sheet.axes(_LEFT_IN, row * pitch + _TITLE_IN, side, _HEIGHT_IN)
        _chart(axes, title, lines, options)
        place = (0.0, -0.36 / _HEIGHT_IN) if narrow else (1.0, 1.04)
        handles, labels = axes.get_legend_handles_labels()
        step = -(-len(handles) // _MOST_NAMED)
        axes.legend(
            handles[::step], labels[::step], loc="upper left", bbox_to_anchor=place, fontsize=6, borderpad=0,
            ncols=columns, labelspacing=0.3 if narrow else 0.5, columnspacing=1,
        )  # fmt: skip
    return sheet.figure


def _chart(axes: Axes, title: str, lines: list[tuple[str, Numbers]], options: PictureOptions) -> None:
    """Draw singular values by their rank, largest first, on a logarithmic axis unless the scale is linear."""
    colours = palette(options) if options.palette else colormaps["viridis"]
    low, high = (0.0, 0.88) if options.theme == "light" else (0.25, 1.0)
    places = np.linspace(low, high, max(len(lines), 2))
    largest = max((float(values.max(initial=0)) for _, values in lines), default=0.0) or 1.0
    for (name, values), place in zip(lines, places, strict=False):
        shown = np.where(values > largest * _MIN_SINGULAR_VALUE, values, np.nan)
        at = np.arange(1, len(shown) + 1)
        axes.plot(at, shown, color=colours(float(place)), linewidth=1, label=name, marker="." if len(at) < 33 else None)
    if options.scale != "linear":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.set_title(title)
    axes.set(xlabel="rank", ylabel="singular value")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, color=SECOND[options.theme], alpha=0.18)
    axes.spines[["top", "right"]].set_visible(False)


def _table(reply: CircuitsReply, options: PictureOptions, names: Names) -> Figure:
    """Draw norms, ranks and copying of each head."""
    columns: dict[str, Numbers] = {}
    for label, circuit in (("QK", reply.qk), ("OV", reply.ov)):
        for field in ("norm", "effective_rank", "stable_rank", "copying"):
            if (values := getattr(circuit, field, None)) is not None:
                columns[f"{label} {field}"] = values
    if not columns:
        raise InvalidRequest.at("parts", "expected qk or ov, to draw the statistics of heads")
    heads = [head_name(None, head) for head in np.atleast_1d(reply.heads)]
    return head_table(columns, heads, heading(names, "circuits", f"{len(heads)} heads"), options)


def _composition(reply: CircuitsReply, options: PictureOptions, names: Names) -> Figure:
    """Draw the scores of each head with each later head, as one map for Q, K and V composition."""
    composition = reply.composition
    maps = [] if composition is None else [(part, getattr(composition, part)) for part in "qkv"]
    present = [(f"{part.upper()} composition", values) for part, values in maps if values is not None]
    if composition is None or not present:
        raise InvalidRequest.at("with", "expected a later module, to draw composition scores")
    rows = [head_name(None, head) for head in np.atleast_1d(reply.heads)]
    columns = [head_name(None, head) for head in range(present[0][1].shape[-1])]
    baseline = f"{composition.baseline:.3f} if this head's outputs were rotated at random"
    return heat_maps(
        np.stack([values for _, values in present]).astype(np.float32), [title for title, _ in present],
        heading(names, f"composition with {composition.module}", baseline), options,
        queries=rows, keys=columns, axes_names=("head", "later head"), quantity="score",
    )  # fmt: skip

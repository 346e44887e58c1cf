"""Costs as a picture: time and peak memory along a sweep, on logarithmic axes."""

from collections.abc import Iterator, Sequence
from math import log
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, NullLocator

from attention_contract.schemas.answers import Crossover
from attention_contract.schemas.costs.complexity import Compared, ComplexityReply
from attention_contract.schemas.costs.sweeps import Sweep
from attention_contract.schemas.picture_options import NO_TITLE, PictureOptions
from attention_pictures.figure_style import SECOND
from attention_pictures.text_sizes import wrapped

_ROW_IN, _CHART_IN, _AROUND_IN = 0.2, 3.6, 0.75
"""Inches of a row of the legend, of the charts, and around them."""
_NARROW_IN, _BESIDE_IN = 5.5, 0.9
"""The width below which one chart stands below the other, and what a chart has beside it."""
_LINES: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C", "#B8A100")
"""Colours that a colour-blind reader can tell apart. Source: Okabe and Ito 2008; its yellow is darkened."""
_MOST_BANDS, _MOST_MARKS, _MOST_MARKERS, _MOST_LETTERS = 6, 6, 32, 40
"""Beyond which a picture shows less with more."""
_FEW_POWERS = 100
"""From top to bottom of an axis: below, 2 and 5 of each power of ten have a number too."""
_NEAR = 0.03
"""Crossovers closer than this share of an axis share a label."""


def cost_lines(reply: ComplexityReply, sweep: Sweep, options: PictureOptions) -> Figure:
    """Draw one line per alternative; bands are intervals of times, dashed lines crossovers.

    Bands and crossovers that would hide their lines are omitted, with a note.
    """
    shown = reply.series
    width, ink = options.inches, SECOND[options.theme]
    labels = [one.label for one in shown] + ["free"]
    columns = max(1, min(len(labels), int(width / (0.6 + 0.075 * max(map(len, labels))))))
    charts = (2, 1) if width < _NARROW_IN else (1, 2)
    height = charts[0] * (_CHART_IN - 1) + 1 + _AROUND_IN + _ROW_IN * -(-len(labels) // columns)
    figure = Figure(figsize=(width, height), dpi=options.resolution, layout="constrained")
    time, memory = figure.subplots(*charts)
    banded = len(shown) <= _MOST_BANDS
    for one, look in zip(shown, _looks(), strict=False):
        _line(time, memory, one, sweep, look, banded=banded)
    notes = [] if banded else ["the intervals of times"]
    for axes, what in ((time, "time"), (memory, "peak_bytes")):
        notes += _mark(axes, [crossover for crossover in reply.crossovers if crossover.of == what], sweep.values, ink)
    memory.axhline(reply.limits.free_bytes, color=ink, linewidth=0.8, linestyle=":", label="free")
    title = wrapped(f"time of a forward pass on {_devices(shown)}", 8, width / charts[1] - _BESIDE_IN)
    _finish(time, "\n".join(title), f"seconds{', with the interval' * banded}", sweep)
    _finish(memory, "peak memory", "bytes", sweep)
    for axes in (time, memory):
        axes.grid(visible=True, which="major", color=ink, alpha=0.18)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*memory.get_legend_handles_labels(), loc="outside lower center", ncols=columns)
    if options.title not in {None, NO_TITLE}:
        figure.suptitle("\n".join(wrapped(str(options.title), 9, width - 0.2, bold=True)), fontsize=9, weight="bold")
    if notes:
        note = "\n".join(wrapped(f"left out, as they are too many: {', '.join(notes)}", 7, width / charts[1] - 0.2))
        time.text(0, 1.12, note, fontsize=7, color=ink, va="bottom", transform=time.transAxes)
    return figure


def _looks() -> Iterator[dict[str, Any]]:
    """Distinguishable colours, and as many styles of lines."""
    for style in ("-", "--", ":", "-."):
        for colour in _LINES:
            yield {"color": colour, "linestyle": style}


def _line(time: Axes, memory: Axes, one: Compared, sweep: Sweep, look: dict[str, Any], *, banded: bool) -> None:
    """Draw the time and the peak memory of one alternative."""
    order = sorted(range(len(sweep.values)), key=sweep.values.__getitem__)
    values, costs = [sweep.values[at] for at in order], [one.costs[at] for at in order]
    look = look | ({"marker": "o", "markersize": 3} if len(values) <= _MOST_MARKERS else {})
    forward = [cost.predicted.forward for cost in costs]
    time.plot(values, [took.median_ms / 1e3 for took in forward], label=one.label, **look)
    if banded:
        bounds = [took.low_ms / 1e3 for took in forward], [took.high_ms / 1e3 for took in forward]
        time.fill_between(values, *bounds, color=look["color"], alpha=0.15, linewidth=0)
    memory.plot(values, [cost.peak_bytes.request for cost in costs], label=one.label, **look)


def _mark(axes: Axes, crossovers: Sequence[Crossover], values: Sequence[int], ink: str) -> list[str]:
    """Draw a line at each crossover within the picture, and return notes on those omitted."""
    places = {(one.measured or one.at, one.cheaper) for one in crossovers if one.at is not None}
    inside = sorted((at, cheaper) for at, cheaper in places if min(values) <= at <= max(values))
    if len(inside) > _MOST_MARKS:
        return [f"{len(inside)} crossovers of {'time' if crossovers[0].of == 'time' else 'memory'}"]
    apart = _NEAR * log(max(values) / max(1, min(values)) + 1)
    near: list[list[tuple[int, str | None]]] = []
    for at, cheaper in inside:
        axes.axvline(at, color=ink, linewidth=0.8, linestyle="--")
        if near and log(at / near[-1][0][0]) < apart:
            near[-1].append((at, cheaper))
        else:
            near.append([(at, cheaper)])
    for group in near:
        at, cheaper = group[0]
        crossover = _clipped(f"{cheaper} from {at}") if len(group) == 1 else f"{len(group)} crossovers from {at} on"
        place = axes.get_xaxis_transform()
        axes.text(at, 0.02, crossover, rotation=90, va="bottom", ha="right", fontsize=7, transform=place)
    return []


def _clipped(text: str) -> str:
    """The end, which says where, and of the rest as much as an axis is high."""
    return text if len(text) <= _MOST_LETTERS else f"…{text[-_MOST_LETTERS:]}"


def _finish(axes: Axes, title: str, unit: str, sweep: Sweep) -> None:
    least = min((value for value in sweep.values if value), default=1)
    if 0 in sweep.values:
        axes.set_xscale("symlog", linthresh=least)
    else:
        axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted(set(sweep.values))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks[:: -(-len(ticks) // 9)], [f"{tick}" for tick in ticks[:: -(-len(ticks) // 9)]])
    written = EngFormatter(unit="B" if unit == "bytes" else "s")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_formatter(written)
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter(written if high < _FEW_POWERS * low else NullFormatter())
    axes.set(title=title, xlabel=sweep.dimension.replace("_", " "), ylabel=unit)


def _devices(shown: Sequence[Compared]) -> str:
    names = {one.device_name: f"{one.device_name} ({one.costs[0].predicted.basis})" for one in shown}
    return ", ".join(names.values())

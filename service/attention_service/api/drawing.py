"""Costs as a picture: time and peak memory along a sweep, on logarithmic axes."""

import io
from collections.abc import Iterator, Sequence
from math import log
from threading import Lock
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, NullLocator

from attention_contract.schemas.answers import Crossover
from attention_contract.schemas.complexity import Compared, ComplexityReply, Sweep

_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a label is no formula
    "svg.hashsalt": "attention",  # the same picture is the same bytes
}
_WIDTH_IN, _ROW_IN = 10, 0.2
"""Inches of the figure, and of a row of its legend."""
_MOST_BANDS, _MOST_MARKS, _MOST_MARKERS, _MOST_LETTERS = 6, 6, 32, 40
"""Beyond which a picture shows less with more."""
_FEW_POWERS = 100
"""From top to bottom of an axis: below, 2 and 5 of each power of ten have a number too."""
_NEAR = 0.03
"""Crossovers closer than this share of an axis share a label."""
_LOCK = Lock()
"""Matplotlib's settings and fonts are the process's."""


def draw(reply: ComplexityReply, sweep: Sweep, kind: str) -> bytes:
    """Draw an SVG or a PNG with one line per alternative; bands are intervals of times, dashed lines crossovers.

    Bands and crossovers that would hide their lines are omitted, with a note.
    """
    shown = reply.series
    labels = [one.label for one in shown] + ["free"]
    columns = max(1, min(len(labels), int(_WIDTH_IN / (0.6 + 0.075 * max(map(len, labels))))))
    with _LOCK, rc_context(_STYLE):
        # Without pyplot, whose state all threads would share.
        height = 4.2 + _ROW_IN * -(-len(labels) // columns)
        figure = Figure(figsize=(_WIDTH_IN, height), layout="constrained")
        time, memory = figure.subplots(1, 2)
        banded = len(shown) <= _MOST_BANDS
        for one, look in zip(shown, _looks(), strict=False):
            _line(time, memory, one, sweep, look, banded=banded)
        notes = [] if banded else ["the intervals of times"]
        for axes, what in ((time, "time"), (memory, "peak_bytes")):
            notes += _mark(axes, [found for found in reply.crossovers if found.of == what], sweep.values)
        memory.axhline(reply.limits.free_bytes, color="0.5", linewidth=0.8, linestyle=":", label="free")
        _finish(time, f"time of a forward pass on {_devices(shown)}", f"seconds{', with the interval' * banded}", sweep)
        _finish(memory, "peak memory", "bytes", sweep)
        figure.legend(*memory.get_legend_handles_labels(), loc="outside lower center", ncols=columns)
        if notes:
            figure.suptitle(f"left out, as they are too many: {', '.join(notes)}", fontsize=7, color="0.4")
        drawn = io.BytesIO()
        figure.savefig(drawn, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else None)
    return drawn.getvalue()


def _looks() -> Iterator[dict[str, Any]]:
    """Distinguishable colours, and as many styles of lines."""
    for style in ("-", "--", ":", "-."):
        for colour in range(10):
            yield {"color": f"C{colour}", "linestyle": style}


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


def _mark(axes: Axes, crossovers: Sequence[Crossover], values: Sequence[int]) -> list[str]:
    """Draw a line at each crossover within the picture, and return notes on those omitted."""
    found = {(one.measured or one.at, one.cheaper) for one in crossovers if one.at is not None}
    inside = sorted((at, cheaper) for at, cheaper in found if min(values) <= at <= max(values))
    if len(inside) > _MOST_MARKS:
        return [f"{len(inside)} crossovers of {'time' if crossovers[0].of == 'time' else 'memory'}"]
    apart = _NEAR * log(max(values) / max(1, min(values)) + 1)
    near: list[list[tuple[int, str | None]]] = []
    for at, cheaper in inside:
        axes.axvline(at, color="0.4", linewidth=0.8, linestyle="--")
        if near and log(at / near[-1][0][0]) < apart:
            near[-1].append((at, cheaper))
        else:
            near.append([(at, cheaper)])
    for group in near:
        at, cheaper = group[0]
        told = _clipped(f"{cheaper} from {at}") if len(group) == 1 else f"{len(group)} crossovers from {at} on"
        place = axes.get_xaxis_transform()
        axes.text(at, 0.02, told, rotation=90, va="bottom", ha="right", fontsize=7, transform=place)
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
    axes.grid(visible=True, which="major", color="0.92")
    axes.set(title=title, xlabel=sweep.dimension.replace("_", " "), ylabel=unit)


def _devices(shown: Sequence[Compared]) -> str:
    names = {one.device_name: f"{one.device_name} ({one.costs[0].predicted.basis})" for one in shown}
    return ", ".join(names.values())

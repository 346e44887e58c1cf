"""Costs as a picture: time and peak memory along a sweep, on logarithmic axes."""

import io
from collections.abc import Sequence
from threading import Lock
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullLocator

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
_LOCK = Lock()
"""Matplotlib's settings and fonts are the process's."""


def draw(reply: ComplexityReply, sweep: Sweep, kind: str) -> bytes:
    """An SVG or a PNG, one line for each thing compared; bands are intervals of times, dashed lines crossovers."""
    shown = reply.series
    with _LOCK, rc_context(_STYLE):
        # Without pyplot, whose state all threads would share.
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        time, memory = figure.subplots(1, 2)
        for one in shown:
            order = sorted(range(len(sweep.values)), key=sweep.values.__getitem__)
            values, costs = [sweep.values[at] for at in order], [one.costs[at] for at in order]
            forward = [cost.predicted.forward for cost in costs]
            (line,) = time.plot(
                values, [took.median_ms / 1e3 for took in forward], marker="o", markersize=3, label=one.label
            )
            bounds = [took.low_ms / 1e3 for took in forward], [took.high_ms / 1e3 for took in forward]
            time.fill_between(values, *bounds, color=line.get_color(), alpha=0.15, linewidth=0)
            held = [cost.peak_bytes.request for cost in costs]
            memory.plot(values, held, marker="o", markersize=3, color=line.get_color(), label=one.label)
        for axes, what in ((time, "time"), (memory, "peak_bytes")):
            _mark(axes, [found for found in reply.crossovers if found.of == what], sweep.values)
        memory.axhline(reply.limits.free_bytes, color="0.5", linewidth=0.8, linestyle=":", label="free")
        _finish(time, f"time of a forward pass on {_devices(shown)}", "seconds, with the interval", sweep)
        _finish(memory, "peak memory", "bytes", sweep)
        drawn = io.BytesIO()
        figure.savefig(drawn, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else None)
    return drawn.getvalue()


def _mark(axes: Axes, crossovers: Sequence[Crossover], values: Sequence[int]) -> None:
    """A line at each size from which on one costs less, where the picture shows it."""
    for at, cheaper in sorted({(found.at, found.cheaper) for found in crossovers if found.at is not None}):
        if min(values) <= at <= max(values):
            axes.axvline(at, color="0.4", linewidth=0.8, linestyle="--")
            told, place = f"{cheaper} from {at}", axes.get_xaxis_transform()
            axes.text(at, 0.02, told, rotation=90, va="bottom", ha="right", fontsize=7, transform=place)


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
    axes.yaxis.set_major_formatter(EngFormatter(unit="B" if unit == "bytes" else "s"))
    axes.grid(visible=True, which="major", color="0.92")
    axes.set(title=title, xlabel=sweep.dimension.replace("_", " "), ylabel=unit)
    axes.legend()


def _devices(shown: Sequence[Compared]) -> str:
    names = {one.device_name: f"{one.device_name} ({one.costs[0].predicted.basis})" for one in shown}
    return ", ".join(names.values())

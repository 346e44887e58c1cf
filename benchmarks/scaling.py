"""Growth of the cost of a served request with length, width, heads, batch and concurrency.

``python -m benchmarks.scaling`` prints the tables; ``--output benchmarks/results/scaling.md`` writes them, and a
picture beside them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.contestants import BATCHING, OURS, UNBATCHED, entries
from benchmarks.page import fewer, parser, publish
from benchmarks.rounds import Cell, compare
from benchmarks.tables import short, table
from benchmarks.workloads import WORKLOADS, Workload

BASE = Workload("scaling", 1, 128, 256, 8)
NAMES = OURS, UNBATCHED, BATCHING
TEXT = """One request at a time in safetensors, B1 L128 d256 h8 but for what grows; for the concurrency, W1 (L16 d64
h4). `attention serve` beside bare ASGI applications that do nothing but the attention. Times are the median (p50) of a
request's, the median of {rounds} rounds; the exponents are slopes of logarithms over the larger half of each table.
"""


@dataclass(frozen=True)
class Sweep:
    """One dimension, the others held."""

    title: str
    letter: str
    field: str
    """Field of the workload; empty for the number of connections."""
    values: tuple[int, ...]

    def runs(self) -> list[tuple[Workload, tuple[int, ...]]]:
        """Workloads, and the connections on which each is asked."""
        if not self.field:
            return [(WORKLOADS["W1"], self.values)]
        changed = [{"name": f"{self.field}-{value}", self.field: value} for value in self.values]
        return [(replace(BASE, **change), (1,)) for change in changed]  # type: ignore[arg-type]


SWEEPS = (
    Sweep("Length", "n", "length", (16, 64, 256, 1024, 4096)),
    Sweep("Width", "d", "width", (64, 128, 256, 512, 1024)),
    Sweep("Heads", "h", "heads", (1, 4, 16, 64)),
    Sweep("Batch", "b", "batch", (1, 4, 16, 64)),
    Sweep("Concurrency", "c", "", (1, 4, 16, 64)),
)
Found = dict[str, dict[int, Cell]]
"""Cells by entry and by value."""


def sweep(grown: Sweep, rounds: int, folder: Path) -> Found:
    """Measure one dimension."""
    found: Found = {name: {} for name in NAMES}
    for workload, connections in grown.runs():
        chosen = [entry for entry in entries(workload.name) if entry.name in NAMES and not entry.form.text]
        for cell in compare(workload, chosen, connections, rounds, workload.seconds, folder).cells:
            value = getattr(workload, grown.field) if grown.field else cell.connections
            found[cell.entry.name][value] = cell
    return found


def p50(cell: Cell) -> float:
    """Milliseconds."""
    return median(load.p50_ms for load in cell.loads)


def exponent(points: dict[int, Cell]) -> float:
    """The slope of the logarithm of time over the larger half."""
    values = sorted(points)[-max(2, (len(points) + 1) // 2) :]
    return float(np.polyfit(np.log(values), np.log([p50(points[value]) for value in values]), 1)[0])


def section(grown: Sweep, found: Found) -> Iterator[str]:
    """The table of one dimension."""
    yield f"## {grown.title}\n"
    columns = [f"{name}, {what}" for name in NAMES for what in ("ms", "requests/s")]
    rows = [
        [str(value), *(number for name in NAMES for number in _numbers(found[name][value]))] for value in grown.values
    ]
    exponents = [number for name in NAMES for number in (f"∝ {grown.letter}^{exponent(found[name]):.2f}", "")]
    yield table([grown.letter, *columns], [*rows, ["", *exponents]], left=0) + "\n"


def _numbers(cell: Cell) -> tuple[str, str]:
    return short(p50(cell)), short(median(cell.rates))


def draw(all_found: Sequence[tuple[Sweep, Found]], file: Path) -> None:
    """The same as a picture, on logarithmic axes."""
    import matplotlib.pyplot as plt  # noqa: PLC0415 - nobody needs it who writes no page

    figure, axes = plt.subplots(1, len(all_found), figsize=(3 * len(all_found), 3), layout="constrained", sharey=True)
    for axis, (grown, found) in zip(np.atleast_1d(axes), all_found, strict=True):
        for name in NAMES:
            axis.plot(grown.values, [p50(found[name][value]) for value in grown.values], marker="o", label=name)
        axis.set(xscale="log", yscale="log", xlabel=f"{grown.title.lower()} {grown.letter}")
        axis.set_xticks(grown.values, [str(value) for value in grown.values], minor=False)
        axis.minorticks_off()
    np.atleast_1d(axes)[0].set_ylabel("ms, median")
    np.atleast_1d(axes)[0].legend(fontsize="small")
    figure.savefig(file, metadata={"Date": None})


def measured(rounds: int, folder: Path, picture: Path | None, *, quick: bool) -> Iterator[str]:
    """The sections, as they are found."""
    all_found = []
    for grown in SWEEPS:
        chosen = replace(grown, values=grown.values[:3]) if quick else grown
        all_found.append((chosen, sweep(chosen, rounds, folder)))
        yield from section(*all_found[-1])
    if picture is not None:
        draw(all_found, picture)
        yield f"![The same, on logarithmic axes]({picture.name})\n"


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__, 5).parse_args()
    rounds = arguments.rounds or (fewer(5) if arguments.quick else 5)
    picture = None if arguments.output is None else arguments.output.with_suffix(".svg")
    with TemporaryDirectory() as folder:
        lines = measured(rounds, Path(folder), picture, quick=arguments.quick)
        publish("Growth of what is served", TEXT.format(rounds=rounds), lines, arguments.output)


if __name__ == "__main__":
    main()

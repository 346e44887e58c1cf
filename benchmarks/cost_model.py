"""Accuracy of predicted times for requests that the calibration has not seen.

``python -m benchmarks.cost_model`` prints the tables in Markdown; ``--output docs/cost-model.md`` replaces the tables
of that page.
"""

import argparse
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from attention_service.cost import Calibrated
from attention_service.runtime.calibration.calibrating import SECONDS, Calibration
from attention_service.runtime.calibration.fitting import Point
from attention_service.runtime.calibration.measuring import Bench
from attention_service.runtime.device.torch_device import Device
from benchmarks.crossovers import crossovers

MARK = "<!-- measured -->\n"
"""The results are written after this line."""
ROOM = 2**31
LONGER = 0.25, 1.0
"""Predicted seconds of requests beyond the calibrated sizes, by peak rates; they take up to three times as long."""
ENOUGH_S = 0.5
"""Seconds of runs per held-out request: more than in a calibration, for a more exact reference."""


@dataclass(frozen=True)
class Errors:
    """Errors of predicted medians against measured ones, and of bounds against single runs."""

    signed: NDArray[np.float64]
    covered: NDArray[np.float64]
    """Share of each request's runs within the bounds."""
    again: NDArray[np.float64]
    """Relative difference of two runs of the same request."""

    @classmethod
    def of(cls, points: Sequence[Point], clock: Calibrated) -> "Errors":
        """Return the errors of measured requests."""
        predicted = [clock.of(point.terms, point.kind) for point in points]
        pairs = list(zip(predicted, points, strict=True))
        covered = [np.mean([each.low <= run <= each.high for run in point.seconds]) for each, point in pairs]
        again = [abs(a / b - 1) for point in points for a, b in combinations(point.seconds, 2)]
        return cls(
            np.array([each.median / point.median - 1 for each, point in pairs]), np.array(covered), np.array(again)
        )

    def row(self, name: str) -> str:
        """Return a line of the table."""
        far = np.abs(self.signed)
        again = f"{np.median(self.again):.1%} · {np.quantile(self.again, 0.95):.0%}" if len(self.again) else ""
        return (
            f"| {name} | {len(far)} | {np.median(self.signed):+.1%} | {np.median(far):.1%} | "
            f"{np.quantile(far, 0.95):.0%} | {self.covered.mean():.1%} | {again} |"
        )


def held_out(bench: Bench, count: int) -> tuple[list[Point], int]:
    """Return the requests, and the number of those dropped because the machine was disturbed or nothing was drawn."""
    points: list[Point] = []
    dropped = 0
    while len(points) < count:
        point = bench.next()
        if point is None:
            dropped += 1
        else:
            points.append(point)
    return points, dropped


def tables(points: Sequence[Point], beyond: Sequence[Point], clock: Calibrated) -> Iterator[str]:
    """Yield tables of errors: all, by kind, by time, and beyond the calibrated sizes."""
    yield "| requests | n | median error | median of \\|error\\| | 95th percentile | runs within bounds | run to run |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    yield Errors.of(points, clock).row("**all**")
    for kind in sorted({point.kind for point in points}):
        yield Errors.of([point for point in points if point.kind == kind], clock).row(kind)
    for low, high in ((0, 5e-4), (5e-4, 2e-3), (2e-3, 1e-2), (1e-2, np.inf)):
        some = [point for point in points if low <= point.median < high]
        if some:
            label = f"{low * 1e3:g} to {high * 1e3:g} ms" if high < np.inf else f"{low * 1e3:g} ms and more"
            yield Errors.of(some, clock).row(label)
    if beyond:
        longest = max(spread.longest for kind, spread in clock.spreads.items() if " " in kind)
        yield Errors.of(beyond, clock).row(f"larger than calibrated (calibrated up to {longest * 1e3:.0f} ms)")


def main() -> None:
    """Calibrate, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=600, help="held-out requests (default: 600)")
    parser.add_argument(
        "--larger", type=int, default=40, help="held-out requests beyond the calibrated sizes (default: 40)"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="seconds of the calibration (default: 60)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=int, default=None, help="threads on the CPU (default: one per core)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=None, help="the page whose tables are replaced")
    options = parser.parse_args()
    device = Device.open(options.device, options.threads)
    started = perf_counter()
    calibration = Calibration(device, ROOM, seed=options.seed, seconds=options.seconds)
    while calibration.step():
        pass
    clock = calibration.clock()
    taken = perf_counter() - started
    rates = clock.curves.rates
    points, dropped = held_out(Bench(device, rates, ROOM, options.seed + 1, enough_s=ENOUGH_S), options.requests)
    beyond, _ = held_out(Bench(device, rates, ROOM, options.seed + 2, enough_s=ENOUGH_S, longer=LONGER), options.larger)
    lines = [
        f"{device.model}, {device.name}, torch {torch.__version__}, Python {platform.python_version()}.",
        f"The calibration ran {calibration.points} requests in {taken:.0f} s. The test ran {len(points)} other",
        f"requests; {dropped} more were dropped because the machine was disturbed. Errors compare the predicted median",
        "with the median of a request's runs. Bounds are compared with single runs. `run to run` is the difference of",
        "two runs of one request, median and 95th percentile.",
        "",
        *tables(points, beyond, clock),
        "",
        "## Crossovers",
        "",
        *crossovers(replace(device, clock=clock)),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output is not None:
        kept, mark, _ = options.output.read_text("utf-8").partition(MARK)
        if not mark:
            raise SystemExit(f"{options.output} lacks the line {MARK.strip()}, after which the tables belong")
        options.output.write_text(kept + mark + "\n" + text, "utf-8")


if __name__ == "__main__":
    main()

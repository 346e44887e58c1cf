"""How well predicted times hold: a calibration, and requests that it has not seen.

``python -m benchmarks.cost_model`` prints the tables in Markdown; ``--output docs/cost-model.md`` puts them where that
page has the ones before.
"""

import argparse
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from attention_contract.schemas.attention import RawForwardRequest
from attention_contract.spec import AttentionSpec
from attention_service.core.cost import Calibrated, Workload
from attention_service.runtime import forward
from attention_service.runtime.calibration.calibrating import SECONDS, Calibration
from attention_service.runtime.calibration.fitting import Point
from attention_service.runtime.calibration.measuring import Bench
from attention_service.runtime.calibration.probing import Probe
from attention_service.runtime.device import Device

MARK = "<!-- measured -->\n"
"""What comes after it is written here."""
ROOM = 2**31
LONGER = 0.25, 1.0
"""Seconds that requests beyond the calibrated sizes should take by the device's rates alone; they take up to thrice."""
HEADS, WIDTH = 4, 64
ROUNDS = 11
ENOUGH_S = 0.5
"""Of each held-out request there are more runs than a calibration makes: what it takes should be known better."""


@dataclass(frozen=True)
class Variant:
    """One of those that are compared."""

    name: str
    spec: AttentionSpec
    kernel: str


def _variant(name: str, kernel: str, **spec: object) -> Variant:
    return Variant(name, AttentionSpec.model_validate(spec), kernel)


VARIANTS = (
    _variant("fused", "fused"),
    _variant("fused, causal", "fused", masks=[{"name": "causal"}]),
    _variant("blocked, window of 512", "blocked", masks=[{"name": "sliding_window", "left": 511, "right": 0}]),
    _variant("blocked, window of 256", "blocked", masks=[{"name": "sliding_window", "left": 255, "right": 0}]),
    _variant("materialized", "materialized"),
    _variant("linear", "linear", method={"name": "linear"}),
    _variant("performer", "performer", method={"name": "performer", "features": 256}),
    _variant("nystrom", "nystrom", method={"name": "nystrom", "landmarks": 128}),
)
LENGTHS = 64, 16384
SEARCHED = 1.6, 1.2
"""A measured crossover is looked for within these factors: first of the predicted one, then of what was found."""


@dataclass(frozen=True)
class Errors:
    """Of predicted medians against measured ones, and of bounds against single runs."""

    signed: NDArray[np.float64]
    covered: NDArray[np.float64]
    """Of each request, the share of its runs."""
    again: NDArray[np.float64]
    """How much two runs of the same request differ."""

    @classmethod
    def of(cls, points: Sequence[Point], clock: Calibrated) -> "Errors":
        """Of requests that were run."""
        told = [clock.of(point.terms, point.kind) for point in points]
        pairs = list(zip(told, points, strict=True))
        covered = [np.mean([each.low <= run <= each.high for run in point.seconds]) for each, point in pairs]
        again = [abs(a / b - 1) for point in points for a, b in combinations(point.seconds, 2)]
        return cls(
            np.array([each.median / point.median - 1 for each, point in pairs]), np.array(covered), np.array(again)
        )

    def row(self, name: str) -> str:
        """A line of the table."""
        far = np.abs(self.signed)
        again = f"{np.median(self.again):.1%} · {np.quantile(self.again, 0.95):.0%}" if len(self.again) else ""
        return (
            f"| {name} | {len(far)} | {np.median(self.signed):+.1%} | {np.median(far):.1%} | "
            f"{np.quantile(far, 0.95):.0%} | {self.covered.mean():.1%} | {again} |"
        )


def held_out(bench: Bench, count: int) -> tuple[list[Point], int]:
    """So many requests, and how many more were dropped because the machine was disturbed or nothing was drawn."""
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
    """Errors of all, by kind, by time, and beyond what was calibrated."""
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


def crossovers(clock: Calibrated, device: Device) -> Iterator[str]:
    """From which length on one of two takes less time: predicted, and measured."""
    yield "| the one | the other | predicted crossover | measured | predicted / measured |"
    yield "|---|---|---:|---:|---:|"
    found = []
    for one, other in combinations(VARIANTS, 2):
        predicted = _crossing(lambda n, a=one, b=other: _told(clock, a, n, device) / _told(clock, b, n, device))
        if predicted is None:
            continue
        measured = _measured_crossing(one, other, predicted, device)
        shown = "" if measured is None else f"{measured:.0f} | {predicted / measured:.2f}"
        if measured is not None:
            found.append(predicted / measured)
        yield f"| {one.name} | {other.name} | {predicted:.0f} | {shown or 'none near it |'} |"
    far = np.abs(np.log(found))
    if found:
        yield f"\nHalf of {len(found)} within {np.expm1(np.median(far)):.0%}, all within {np.expm1(far.max()):.0%}."


def _crossing(ratio: Callable[[float], float]) -> float | None:
    """Where a ratio of times passes 1, by bisection of the logarithm; None where it does not."""
    low, high = (float(np.log(n)) for n in LENGTHS)
    first = ratio(np.exp(low)) > 1
    if (ratio(np.exp(high)) > 1) == first:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        if (ratio(np.exp(middle)) > 1) == first:
            low = middle
        else:
            high = middle
    return float(np.exp(low))


def _told(clock: Calibrated, variant: Variant, n: float, device: Device) -> float:
    length = round(n)
    work = Workload(1, length, length, HEADS, HEADS, WIDTH, WIDTH, 4, spec=variant.spec, threads=device.threads)
    return clock.forward(work, variant.kernel).median


def _measured_crossing(one: Variant, other: Variant, near: float, device: Device) -> float | None:
    """Ratios of times at lengths round about, in turn; where the line through their logarithms passes 0."""
    for factor in SEARCHED:
        low, high = max(LENGTHS[0], near / factor), min(LENGTHS[1], near * factor)
        lengths = np.unique(np.round(np.geomspace(low, high, 9))).astype(int)
        slope, level = np.polyfit(np.log(lengths), np.log([_ratio(one, other, int(n), device) for n in lengths]), 1)
        if slope == 0:
            return None
        near = float(np.exp(-level / slope))
        if not low / 1.3 <= near <= high * 1.3:
            return None
    return near


def _ratio(one: Variant, other: Variant, n: int, device: Device) -> float:
    x = np.random.default_rng(n).standard_normal((1, HEADS, n, WIDTH), np.float32)
    jobs = []
    for variant in (one, other):
        kernel = variant.kernel if variant.spec.method.name == "exact" else None
        request = RawForwardRequest(query=x, key=x, value=x, spec=variant.spec, kernel=kernel)
        jobs.append(forward.prepare(None, request, device, ROOM))
    probe = Probe(device)
    ratios = []
    for _ in range(ROUNDS):
        seconds = []
        for job in jobs:
            probe.fill_caches()  # as between two requests
            started = perf_counter()
            job.run()
            seconds.append(perf_counter() - started)
        ratios.append(seconds[0] / seconds[1])
    return float(np.median(ratios))


def main() -> None:
    """Calibrate, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=600, help="held-out requests (default: 600)")
    parser.add_argument("--larger", type=int, default=40, help="of those larger than calibrated (default: 40)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the calibration (default: 60)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=int, default=None, help="on the CPU; default: one for each core")
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
        f"{device.model}, {device.name}, torch {torch.__version__}, Python {platform.python_version()}. Calibration:",
        f"{calibration.points} requests in {taken:.0f} s. Then {len(points)} others; {dropped} more were dropped,",
        "while the machine was disturbed. Errors are of the predicted median against the median of a request's runs;",
        "bounds are held against single runs; `run to run` is how much two runs of one request differ, median and",
        "95th percentile.",
        "",
        *tables(points, beyond, clock),
        "",
        "## Where one begins to take less time than another",
        "",
        f"Forward, {HEADS} heads of {WIDTH}, float32, by the same calibration. A measured crossover is where the line",
        "through nine ratios of interleaved medians, close to it, passes 1; before each run the caches are filled with",
        "something else, as they are between two requests.",
        "",
        *crossovers(clock, device),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output is not None:
        kept, mark, _ = options.output.read_text("utf-8").partition(MARK)
        if not mark:
            raise SystemExit(f"{options.output} has no line {MARK.strip()} after which to write")
        options.output.write_text(kept + mark + "\n" + text, "utf-8")


if __name__ == "__main__":
    main()

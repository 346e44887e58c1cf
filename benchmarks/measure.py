"""One thing beside another, in this process: interleaved rounds, medians and ratios."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median, quantiles

import torch

from benchmarks.tables import short, table

MOST_SECONDS = 60
"""Longest time of one case; a slow case gets fewer rounds."""
FEWEST = 3


@dataclass(frozen=True)
class Case:
    """One thing to time, beside what it is compared with, and the work that both do."""

    name: str
    run: Callable[[], object]
    baseline_name: str
    baseline: Callable[[], object]
    flops: int | None = None
    """Floating-point operations of one run; None where there is no meaningful count."""
    predicted_ms: float | None = None


@dataclass(frozen=True)
class Result:
    """The medians of a case and its baseline, and how their ratio varied from round to round."""

    case: Case
    rounds: int
    ms: float
    baseline_ms: float
    ratio: float
    low: float
    """Tenth percentile of the ratio."""
    high: float
    """Ninetieth percentile."""


def measure(case: Case, rounds: int, most_seconds: float = MOST_SECONDS) -> Result:
    """Time a case and its baseline in turn.

    The order never changes, so that each runs after the other and never after itself, with its own data in the caches.
    """
    for work in (case.run, case.baseline):
        work()
    ours: list[float] = []
    theirs: list[float] = []
    started = time.monotonic()
    while len(ours) < rounds and (len(ours) < FEWEST or time.monotonic() - started < most_seconds):
        ours.append(_milliseconds(case.run))
        theirs.append(_milliseconds(case.baseline))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    tenths = quantiles(ratios, n=10, method="inclusive")
    return Result(case, len(ours), median(ours), median(theirs), median(ratios), tenths[0], tenths[-1])


def _milliseconds(work: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def rows(cases: Iterable[Case], rounds: int) -> Iterator[str]:
    """A table of the cases, line by line as they are measured."""
    head = ["case", "ms", "baseline", "ms", "ratio", "10–90 %", "rounds", "dense GFLOP/s", "predicted ms"]
    yield table(head, [])
    for case in cases:
        result = measure(case, rounds)
        rate = f"{case.flops / result.ms / 1e6:.1f}" if case.flops is not None else ""
        predicted = short(case.predicted_ms) if case.predicted_ms is not None else ""
        spread = f"{short(result.low)}–{short(result.high)}"
        numbers = [short(result.baseline_ms), f"{result.ratio:.3f}", spread, str(result.rounds), rate, predicted]
        yield f"| {' | '.join([case.name, short(result.ms), case.baseline_name, *numbers])} |"

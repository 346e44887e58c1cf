"""Interleaved rounds, medians and ratios."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles

import torch


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
    ms: float
    baseline_ms: float
    ratio: float
    low: float
    high: float


def measure(case: Case, rounds: int) -> Result:
    """Time a case and its baseline in turn, in an order that alternates."""
    for work in (case.run, case.baseline):
        work()
    ours, theirs = [], []
    for index in range(rounds):
        pair = [(case.run, ours), (case.baseline, theirs)]
        for work, times in pair if index % 2 else pair[::-1]:
            times.append(_milliseconds(work))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    tenths = quantiles(ratios, n=10)
    return Result(case, median(ours), median(theirs), median(ratios), tenths[0], tenths[-1])


def _milliseconds(work: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3

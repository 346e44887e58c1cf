"""Accuracy of predicted times: requests that run teach a clock, and others are predicted by it.

``python -m benchmarks.cost_model`` prints the tables in Markdown; ``--output benchmarks/results/cost_model.md`` writes
the page.
"""

import argparse
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from attention_service.cost import Clock, Estimate
from attention_service.runtime.device.torch_device import Device, measure_rates
from attention_service.runtime.planning.learned_factors import SPACING_S, LearnedFactors
from attention_service.runtime.planning.prediction_accuracy import TimedRun
from benchmarks.crossovers import crossovers
from benchmarks.measured_requests import Bench, Measured

HEAD = """# Accuracy of predicted times

Requests that run teach a clock, which predicts others. [The cost model](../../docs/cost-model.md) explains it.

"""
FREE_BYTES = 2**31
ENOUGH_S = 0.5
"""Seconds of runs per held-out request: more than in the first part, for a more exact reference."""


@dataclass(frozen=True)
class Errors:
    """Errors of predicted medians against measured ones, and of bounds against single runs."""

    signed: NDArray[np.float64]
    covered: NDArray[np.float64]
    """Share of each request's runs within the bounds."""
    again: NDArray[np.float64]
    """Relative difference of two runs of the same request."""

    @classmethod
    def of(cls, measured: Sequence[Measured], predicted: Sequence[Estimate]) -> "Errors":
        """Return the errors of measured requests."""
        pairs = list(zip(predicted, measured, strict=True))
        covered = [np.mean([each.low <= run <= each.high for run in one.seconds]) for each, one in pairs]
        again = [abs(a / b - 1) for one in measured for a, b in combinations(one.seconds, 2)]
        return cls(np.array([each.median / one.median - 1 for each, one in pairs]), np.array(covered), np.array(again))

    def row(self, name: str) -> str:
        """Return a line of the table."""
        far = np.abs(self.signed)
        again = f"{np.median(self.again):.1%} · {np.quantile(self.again, 0.95):.0%}" if len(self.again) else ""
        return (
            f"| {name} | {len(far)} | {np.median(self.signed):+.1%} | {np.median(far):.1%} | "
            f"{np.quantile(far, 0.95):.0%} | {self.covered.mean():.1%} | {again} |"
        )


def measured(bench: Bench, count: int) -> tuple[list[Measured], int]:
    """Return requests that ran, and the number of those dropped because the machine was disturbed."""
    found: list[Measured] = []
    dropped = 0
    while len(found) < count:
        one = bench.next_request()
        if one is None:
            dropped += 1
        else:
            found.append(one)
    return found, dropped


def learned(base: Clock, runs: Sequence[Measured]) -> Clock:
    """Return the clock that these runs teach."""
    factors = LearnedFactors(base)
    for at, one in enumerate(runs):
        factors.see(
            TimedRun(one.kernel, one.computation, one.predicted(base), one.median, 0), one.dtype, at * SPACING_S
        )
    return factors.changed(0.0) or base


def tables(held: Sequence[Measured], clocks: dict[str, Clock]) -> Iterator[str]:
    """Yield tables of errors: of each clock, and of the last one by kind, dtype and time."""
    yield "| requests | n | median error | median of \\|error\\| | 95th percentile | runs within bounds | run to run |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for name, clock in clocks.items():
        yield Errors.of(held, [one.predicted(clock) for one in held]).row(f"**all, {name}**")
    *_, clock = clocks.values()
    groups = [(f"{one.computation} {one.kernel}", one) for one in held] + [(one.dtype, one) for one in held]
    for low, high in ((0, 5e-4), (5e-4, 2e-3), (2e-3, 1e-2), (1e-2, np.inf)):
        label = f"{low * 1e3:g} to {high * 1e3:g} ms" if high < np.inf else f"{low * 1e3:g} ms and more"
        groups += [(label, one) for one in held if low <= one.median < high]
    for label in dict.fromkeys(label for label, _ in groups):
        some = [one for name, one in groups if name == label]
        yield Errors.of(some, [one.predicted(clock) for one in some]).row(label)


def main() -> None:
    """Run, learn, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learn", type=int, default=600, help="requests that teach the clock (default: 600)")
    parser.add_argument("--requests", type=int, default=300, help="held-out requests (default: 300)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=int, default=None, help="threads on the CPU (default: one per core)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=None, help="file to write the page to")
    options = parser.parse_args()
    device = Device.open(options.device, options.threads)
    base, rates = device.clock, measure_rates(device.torch)
    runs, _ = measured(Bench(device, rates, FREE_BYTES, options.seed), options.learn)
    held, dropped = measured(Bench(device, rates, FREE_BYTES, options.seed + 1, enough_s=ENOUGH_S), options.requests)
    clock = learned(base, runs)
    lines = [
        f"{device.model}, {device.name}, torch {torch.__version__}, Python {platform.python_version()}.",
        f"{len(runs)} requests taught the clock, and {len(held)} others were predicted; {dropped} more were dropped",
        "because the machine was disturbed. Errors compare the predicted median with the median of a request's runs.",
        "Bounds are compared with single runs. `run to run` is the difference of two runs of one request, median and",
        "95th percentile.",
        "",
        *tables(held, {"before any ran": base, "learned": clock}),
        "",
        "## Crossovers",
        "",
        *crossovers(replace(device, clock=clock)),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output is not None:
        options.output.write_text(HEAD + text, "utf-8")


if __name__ == "__main__":
    main()

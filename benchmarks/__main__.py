"""Run every benchmark and write the table."""

import argparse
import platform
from collections.abc import Iterable
from pathlib import Path

import torch

from attention_service.api.observing import configure_logging
from attention_service.runtime.device import Device
from benchmarks import admission, kernels, server, wire
from benchmarks.measure import Case, Result, measure

TABLE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Written by `make bench`. Each row times a case and its baseline in turn, {rounds} rounds each; `ratio` is the median of
the ratios round by round, with the tenth and ninetieth percentile beside it. The milliseconds belong to the machine;
the ratio says more.

Measured on {machine}, Python {python}, torch {torch}, device {device}.
"""
ADMISSION = (
    f"What needs {admission.TIMES} times the memory budget or more, refused over HTTP on loopback before anything is "
    "allocated for it: one\nhead, a body of a megabyte in safetensors."
)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21, help="rounds of each pair (default: 21)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--output", type=Path, default=TABLE, help="where the table is written")
    options = parser.parse_args()
    configure_logging("error", "console")
    device = Device.open(options.device)
    pages = [
        HEAD.format(
            rounds=options.rounds, machine=platform.machine(), python=platform.python_version(),
            torch=torch.__version__.partition("+")[0], device=device.name,
        ),
        _section("Kernels", "The core's kernels, 8 heads of width 64, float32.", kernels.cases(device), options.rounds),
        _section("Wire", "Reading one request.", wire.cases(), options.rounds),
        _section("Server", "One client, one request at a time, over HTTP on loopback.", server.cases(), options.rounds),
        _section("Admission", ADMISSION, admission.cases(), options.rounds),
    ]  # fmt: skip
    options.output.write_text("\n".join(pages))


def _section(title: str, text: str, cases: Iterable[Case], rounds: int) -> str:
    lines = [
        f"## {title}", "", text, "",
        "| case | ms | baseline | ms | ratio | 10–90 % | dense GFLOP/s | predicted ms |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for case in cases:
        lines.append(_row(measure(case, rounds)))
        print(lines[-1], flush=True)
    return "\n".join([*lines, ""])


def _row(result: Result) -> str:
    case = result.case
    rate = f"{case.flops / result.ms / 1e6:.1f}" if case.flops is not None else ""
    predicted = f"{case.predicted_ms:.3f}" if case.predicted_ms is not None else ""
    return (
        f"| {case.name} | {result.ms:.3f} | {case.baseline_name} | {result.baseline_ms:.3f} | {result.ratio:.2f} "
        f"| {result.low:.2f}–{result.high:.2f} | {rate} | {predicted} |"
    )


if __name__ == "__main__":
    main()

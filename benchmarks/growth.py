"""Growth of time and memory with the length: measured exponents of every variant.

``python -m benchmarks.growth`` prints a table in Markdown; ``--output benchmarks/results/growth.md`` writes the page.
One head, width 64, float32, one thread, forward.
"""

import argparse
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from attention_contract.spec import AttentionSpec
from attention_service.core.attention import attend
from attention_service.core.inputs import make_problem
from attention_service.core.kernels import Needs, unsuitable
from attention_service.core.methods import approximation_of
from attention_service.core.multihead import learned_of
from attention_service.core.problem import Problem, Widths
from attention_service.core.registry import variants
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations.complexity.growth import growth
from attention_service.runtime.operations.complexity.subjects import OUTPUT, DeviceMemory, Subject
from attention_service.runtime.planning.blank_requests import new_request
from attention_service.runtime.planning.request_sizes import RequestSizes

WIDTH = 64
WINDOW = {"name": "sliding_window", "left": 512, "right": 0}
OPTIONS: dict[str, dict[str, Any]] = {
    "sliding_window": {"left": 512, "right": 0},
    "global_tokens": {"positions": [0, 1]},
    "prefix_lm": {"length": 512},
    "block": {"size": 256, "neighbours": 1},
    "strided": {"stride": 256},
    "fixed": {"stride": 256},
    "random_blocks": {"size": 64, "count": 3},
    "documents": {"lengths": [512] * 128},
    "any": {
        "of": [
            {"name": "sliding_window", "left": 256, "right": 256},
            {"name": "global_tokens", "positions": [0, 1]},
        ]
    },
    "all": {"of": [{"name": "causal"}, {"name": "sliding_window", "left": 512}]},
    "learned": {"length": 2**16},
    "linformer": {"rank": 256, "length": 2**16},
}
"""Options of entries that require some. ``any`` is a Longformer."""
PAGE = """# Growth with the length

The table shows the processor time of one thread and the exponents of time and memory. Each case is a forward pass of
one head of width 64 in float32; the time is the best of several runs. Memory is the peak without the inputs.

- Scores, normalizers and positions run under a causal window of 512 keys. Masks and methods run alone. Kernels run
  without masks and under the window.
- Exponents are least-squares slopes on logarithms, over all measured lengths and over those from 4k. The next column
  is the exponent that the cost model predicts, and the last one the asymptotic order that it reports.
- A case ends before the first length that would take more than a minute or 4 GB.

<!-- python -m benchmarks.growth --output benchmarks/results/growth.md writes this page. -->
[variants.md](../../docs/variants.md) has the formulas.

"""
MOST_BYTES = 4e9
FREE_BYTES = 2**62
"""Bytes, for plans that do not depend on memory."""
HEAD = """| attention | kernel | {lengths} | time ∝ n^ | n^ from 4k | memory ∝ n^ | predicted time n^ | in the limit |
|---|---|{rule}---:|---:|---:|---:|---|"""


@dataclass(frozen=True)
class Case:
    """One attention at lengths that double."""

    name: str
    spec: AttentionSpec
    kernel: str | None = None
    """None for the planner's choice at the largest length."""


@dataclass(frozen=True)
class Measured:
    """Processor seconds (the best of the rounds) and peak bytes without the inputs, by length."""

    seconds: dict[int, float]
    peak: dict[int, int]

    def exponents(self, since: int = 0) -> tuple[float, float]:
        """Return the exponents of time and memory from a length on, by least squares on logarithms."""
        sizes = [n for n in self.seconds if n >= since]
        x = np.log(sizes)
        return tuple(
            float(np.polyfit(x, np.log([values[n] for n in sizes]), 1)[0]) for values in (self.seconds, self.peak)
        )  # type: ignore[return-value]


def cases() -> Iterator[Case]:
    """Yield a case for every variant.

    Kernels run dense and under a window, masks alone, methods without masks, and other parts under a window.
    """
    for entry in variants():
        name, part = f"{entry.kind} {entry.name}", {"name": entry.name} | OPTIONS.get(entry.name, {})
        if entry.kind == "kernel":
            if unsuitable(entry.name, AttentionSpec(), torch.float32, Needs(device="cpu")) is None:
                yield Case(name, AttentionSpec(), entry.name)
                yield Case(f"{name}, window", AttentionSpec.model_validate({"masks": [WINDOW]}), entry.name)
        elif entry.kind == "mask":
            yield Case(name, AttentionSpec.model_validate({"masks": [part]}))
        else:
            masks = [] if entry.kind == "method" else [WINDOW]
            yield Case(name, AttentionSpec.model_validate({entry.kind: part, "masks": masks}))
    causal = {"method": {"name": "linear"}, "masks": [{"name": "causal"}]}
    yield Case("method linear, causal", AttentionSpec.model_validate(causal))
    yield Case("method performer, causal", AttentionSpec.model_validate(causal | {"method": {"name": "performer"}}))


def drawn(spec: AttentionSpec, length: int) -> Callable[[], Problem]:
    """Draw one head of one sequence, before position encodings, and the spec's learned tensors."""
    generator = torch.Generator().manual_seed(length)
    three = torch.randn(3, 1, 1, length, WIDTH, generator=generator)
    tensors = dict(zip(("query", "key", "value"), three, strict=True))
    learned = {
        name: torch.randn(sizes.shape, generator=generator) / math.sqrt(sizes.shape[-1])
        for name, sizes in learned_of(spec, Widths(1, 1, WIDTH, WIDTH)).items()
    }
    return lambda: make_problem(spec, tensors, learned, lambda q, k, v: (q, k, v), projected=False)


def blank(spec: AttentionSpec, length: int, device: Device) -> BoundRequest:
    """Return a blank request of the sizes of ``drawn``'s problem."""
    tokens = RequestSizes(1, length, length)
    return new_request(spec, Widths(1, 1, WIDTH, WIDTH), "float32", tokens, threads=device.threads)


@torch.inference_mode()
def measured(case: Case, kernel: str, lengths: list[int], rounds: int, most_seconds: float) -> Measured:
    """Measure each length until one takes too long."""
    found = Measured({}, {})
    for length in lengths:
        run = _attention(drawn(case.spec, length), kernel)
        found.peak[length] = max(1, _peak(run))
        found.seconds[length] = min(_seconds(run) for _ in range(rounds))
        # The next length takes at most four times as much of either.
        if found.seconds[length] * 4 > most_seconds or found.peak[length] * 4 > MOST_BYTES:
            break
    return found


def _attention(problem: Callable[[], Problem], kernel: str) -> Callable[[], object]:
    return lambda: attend(problem(), kernel=kernel)


def _seconds(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def _peak(run: Callable[[], object]) -> int:
    """Return the allocator's peak within one run, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function("the run"):
        run()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())  # type: ignore[union-attr]
    changes = [event for event in events if event.name() == "[memory]"]
    times = [event.start_ns() for event in changes]
    whole = next(event for event in events if event.name() == "the run")
    inside = changes[bisect_left(times, whole.start_ns()) : bisect_left(times, whole.end_ns())]
    return int(max(accumulate(change.nbytes() for change in inside), default=0))


def row(case: Case, device: Device, lengths: list[int], rounds: int, most_seconds: float) -> str:
    """Return one line of the table."""
    largest = blank(case.spec, lengths[-1], device)
    subject = Subject(case.name, largest, OUTPUT, case.kernel, DeviceMemory(device, FREE_BYTES, FREE_BYTES))
    kernel = subject.kernel_of(largest)
    found = measured(case, kernel, lengths, rounds, most_seconds)
    times = [f"{found.seconds[n] * 1e3:.1f}" if n in found.seconds else "" for n in lengths]
    slope, memory = found.exponents()
    later = f"{found.exponents(4096)[0]:.2f}" if sum(n >= 4096 for n in found.seconds) > 1 else ""
    requests = [blank(case.spec, n, device) for n in found.seconds]
    predicted = [subject.time(subject.forward(x, kernel), x, kernel).median for x in requests]
    expected = np.polyfit(np.log([*found.seconds]), np.log(predicted), 1)[0]
    order = growth(subject, "length", lengths, kernel)
    shown = kernel if approximation_of(case.spec) is None else "its own"
    return (
        f"| {case.name} | {shown} | {' | '.join(times)} | {slope:.2f} | {later} | {memory:.2f} | {expected:.2f} "
        f"| {order.time_order}; {order.memory_order} |"
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=2**16, help="the largest n (default: 65536)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each length (default: 3)")
    parser.add_argument("--most-seconds", type=float, default=60, help="leave out lengths beyond this (default: 60)")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--output", type=Path, help="file to write the page to")
    options = parser.parse_args()
    device = Device.open("cpu", threads=1)  # processor time of one thread excludes other programs
    lengths = [2**power for power in range(10, options.longest.bit_length())]
    lines = HEAD.format(
        lengths=" | ".join(f"ms at {n // 1024}k" for n in lengths), rule="---:|" * len(lengths)
    ).splitlines()
    print(*lines, sep="\n", flush=True)
    for case in cases():
        if options.only in case.name:
            lines.append(row(case, device, lengths, options.rounds, options.most_seconds))
            print(lines[-1], flush=True)
    if options.output is not None:
        options.output.write_text(PAGE + "\n".join([*lines, ""]), "utf-8")


if __name__ == "__main__":
    main()

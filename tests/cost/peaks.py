"""What a pass holds on the CPU, as PyTorch's profiler sees it: requests of workloads, and the peaks of their passes.

The passes run on one thread, and so must the workloads say.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from attention_service.cost import Workload
from attention_service.cost.gradient_memory import names_of
from attention_service.runtime.operations.sized_requests import SizedOperations

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
Run = Callable[[], object]


@dataclass
class Request:
    """A workload's passes, as the server runs them, over random tensors."""

    work: Workload

    def __post_init__(self):
        def fill(x):
            if x.is_floating_point():
                x.uniform_()
            else:
                x.fill_(1 if x.dtype == torch.bool else self.work.sequence_keys - 1)

        self._operations = SizedOperations("cpu", fill)
        self._parameters = self._operations.parameters(self.work)

    def forward(self, kernel: str):
        return self._operations.forward(self.work, kernel, self._parameters)

    def backward(self, kernel: str, taps: bool = False, *, twice: bool = False):
        names = names_of(self.work, taps=taps)
        return self._operations.gradients(self.work, kernel, self._parameters, names, twice=twice, checked=False)


def peaks(runs: Sequence[Run]) -> list[int]:
    """The most bytes that each run held at a time. One profile of all of them: to start one takes long."""
    with _undisturbed(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for number, run in enumerate(runs):
            with record_function(f"run|{number}"):
                run()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    allocated = [event for event in events if event.name() == "[memory]"]
    times = [event.start_ns() for event in allocated]
    found = {}
    for event in events:
        if event.name().startswith("run|"):
            inside = allocated[bisect_left(times, event.start_ns()) : bisect_left(times, event.end_ns())]
            found[int(event.name().split("|")[1])] = max(accumulate(change.nbytes() for change in inside))
    return [found[number] for number in range(len(runs))]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """One thread, whatever others have set, and no collection: what it frees would be taken for what the run freed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.set_num_threads(threads)

"""What a pass holds on the CPU, as PyTorch's profiler sees it, and requests with numbers in place of blank ones.

The passes run on one thread, and so must the requests say.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.scheduling.operation import DeviceOperation

CPU = torch.device("cpu")
Run = Callable[[], object]


def filled(bound: BoundRequest) -> BoundRequest:
    """The same request and module with random numbers."""
    rng = np.random.default_rng(0)

    def numbers(name: str, array: np.ndarray) -> np.ndarray:
        if name in {"offsets", "key_lengths", "key_mask"}:
            return array.copy()
        if array.dtype.kind == "b":
            return rng.random(array.shape) > 0.1
        if array.dtype.kind == "i":
            return np.arange(array.size).reshape(array.shape) % 7
        return rng.random(array.shape).astype(array.dtype) * 0.9 + 0.05

    arrays, learned = (
        {name: numbers(name, array) for name, array in given.items()} for given in (bound.arrays, bound.learned)
    )
    module = bound.module
    if module is not None:
        drawn = {name: torch.rand(x.shape).to(x.dtype) for name, x in module.parameters.items()}
        module = replace(module, parameters=MappingProxyType(drawn))
    return bound.replaced(arrays=arrays, learned=learned, module=module)


def run(operation: DeviceOperation) -> dict[str, object]:
    """Upload and launch: the results, which stay on the device.

    The request's tensors are allocated here, as on a device with memory of its own: a CPU takes views of the body.
    """
    uploaded = operation.upload(CPU)
    given = {array.ctypes.data for array in (operation.bound.arrays | operation.bound.learned).values()}
    for tensors in (uploaded.tensors, {} if operation.bound.module is not None else uploaded.parameters):
        for name, x in [*tensors.items()]:
            if x.data_ptr() in given or (x.numel() and "." in name):
                tensors[name] = x.clone()
    return operation.launch(uploaded)


def peaks(runs: Sequence[Run]) -> list[int]:
    """The most bytes that each run held at a time. One profile of all of them: to start one takes long."""
    with _undisturbed(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for number, each in enumerate(runs):
            with record_function(f"run|{number}"):
                each()
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

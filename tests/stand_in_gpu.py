"""A device that the engine takes for a GPU and that computes on the CPU: for what happens around the computations."""

from contextlib import contextmanager

import torch

from attention_service.cost import Rates, Roofline
from attention_service.runtime.device.cuda_graphs import Graphs
from attention_service.runtime.device.torch_device import Device

RATES = Rates(flops_per_s=1e11, bytes_per_s=1e10, overhead_s=1e-3)
"""Of a device on which the start is nearly all there is: everything gains by running together."""
ILLEGAL = "CUDA error: an illegal memory access was encountered"


class StandInGpu(Device):
    """``poison`` breaks it as an illegal access breaks a GPU: every later call fails."""

    is_cuda = True

    def __init__(self, memory: int = 2**34) -> None:
        super().__init__(torch.device("cpu"), "stand-in", memory, Roofline(RATES))
        self.graphs = Graphs(limit=0)
        self.poisoned: Exception | None = None
        self.given_back = 0
        self.unused_pinned = 0

    def poison(self, fault: Exception | None = None) -> None:
        """Fail from now on, in whatever is asked of the device."""
        self.poisoned = fault or torch.AcceleratorError(f"{ILLEGAL}\nmore words")

    def fail_if_poisoned(self) -> None:
        if self.poisoned is not None:
            raise self.poisoned

    def use_own_stream(self, *, first: bool) -> None:
        pass

    def await_parameters(self) -> None:
        self.fail_if_poisoned()

    def peak_meter(self):
        self.fail_if_poisoned()
        return lambda: 0

    def free_bytes(self) -> int:
        return self.total_bytes

    def synchronize(self) -> None:
        self.fail_if_poisoned()

    def probe(self) -> None:
        self.fail_if_poisoned()
        super().probe()

    def _unused_pinned(self) -> int:
        return self.unused_pinned

    def empty_host_cache(self) -> None:
        self.fail_if_poisoned()
        self.unused_pinned = 0

    def empty_cache(self) -> None:
        self.fail_if_poisoned()
        self.given_back += 1


@contextmanager
def stand_in_gpu(monkeypatch, memory: int = 2**34):
    """The device, with PyTorch's functions that have no device to ask."""
    device = StandInGpu(memory)
    monkeypatch.setattr("torch.cuda.empty_cache", device.empty_cache)
    monkeypatch.setattr("torch.accelerator.empty_host_cache", device.empty_host_cache)
    yield device

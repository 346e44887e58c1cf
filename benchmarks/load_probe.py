"""Detection of other load on the machine by a small constant amount of work."""

import time
from collections import deque
from statistics import median

import torch

from attention_service.runtime.device.torch_device import Device

_DISTURBED = 1.2
"""Ratio to the usual time above which the machine is disturbed."""
_ROUNDS, _KEPT, _WARM_UP = 3, 301, 30


class Probe:
    """A small constant amount of work: if it takes longer than usual, another process uses the machine.

    Before a run, it fills the caches with other data, as the work between two requests does.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._matrix = torch.rand(256, 256, device=device.torch)
        self._numbers = torch.rand(2**20, device=device.torch)
        self._product, self._exponentials = torch.empty_like(self._matrix), torch.empty_like(self._numbers)
        self._seen: deque[float] = deque(maxlen=_KEPT)
        for _ in range(_WARM_UP):
            self.seconds()

    def seconds(self) -> float:
        """Return the best time of a few: the first run finds its numbers gone from the caches."""
        self._seen.append(min(self._once() for _ in range(_ROUNDS)))
        return self._seen[-1]

    def fill_caches(self) -> None:
        """Run once without timing."""
        self._once()

    def _once(self) -> float:
        started = time.perf_counter()
        torch.mm(self._matrix, self._matrix, out=self._product)
        torch.exp(self._numbers, out=self._exponentials)
        self._device.synchronize()
        return time.perf_counter() - started

    def disturbed(self, *seconds: float) -> bool:
        """True if it took longer than usual."""
        return max(seconds) > _DISTURBED * median(self._seen)

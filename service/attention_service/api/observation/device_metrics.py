"""Metrics of a GPU: its memory, its graphs, whether it computes, and what its driver tells (extra ``nvml``)."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

import torch
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from attention_service.runtime.device.torch_device import Device

Read = Callable[[Device], float]
_GAUGES: Final[dict[str, tuple[str, Read]]] = {
    "attention_device_lost": (
        "1 after an error from which the GPU does not recover: restart the server",
        lambda device: float(device.lost is not None),
    ),
    "attention_cuda_allocated_bytes": (
        "Bytes of the GPU that tensors of this process take",
        lambda device: device.allocated_bytes(),
    ),
    "attention_cuda_reserved_bytes": (
        "Bytes of the GPU that PyTorch holds for this process, including tensors",
        lambda device: device.reserved_bytes(),
    ),
    "attention_cuda_pinned_bytes": (
        "Bytes of pinned host memory that PyTorch keeps for later copies",
        lambda device: device.pinned_bytes,
    ),
    "attention_cuda_graphs": ("CUDA graphs that are kept", lambda device: len(device.graphs)),
    "attention_cuda_graph_bytes": ("Bytes of the kept CUDA graphs, by their plans", lambda device: device.graphs.bytes),
}
_COUNTERS: Final[dict[str, tuple[str, Read]]] = {
    "attention_cuda_graph_captures": ("Passes captured as CUDA graphs", lambda device: device.graphs.captures),
    "attention_cuda_graph_replays": ("Passes launched as CUDA graphs", lambda device: device.graphs.replays),
}
_OF_DRIVER: Final[dict[str, tuple[str, Read]]] = {
    "attention_cuda_utilization": (
        "Percent of the last second or less in which the GPU computed anything",
        lambda device: torch.cuda.utilization(device.torch),
    ),
    "attention_cuda_temperature_celsius": (
        "Temperature of the GPU",
        lambda device: torch.cuda.temperature(device.torch),
    ),
    "attention_cuda_power_watts": (
        "Power that the GPU draws",
        lambda device: torch.cuda.power_draw(device.torch) / 1e3,
    ),
}


class DeviceMetrics(Collector):
    """The state of one device. On a CPU the numbers of a GPU are 0."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def collect(self) -> Iterator[Metric]:
        """The numbers as they are now."""
        for name, (text, read) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, value=read(self._device))
        for name, (text, read) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, value=read(self._device))
        yield from self._driver_metrics()

    def _driver_metrics(self) -> Iterator[Metric]:
        """The numbers of NVML; none without it, on a CPU, or of a GPU that is lost."""
        if not self._device.is_cuda or self._device.lost is not None:
            return
        # Without the package ModuleNotFoundError; NVML's own errors are RuntimeErrors, or those of the package.
        with suppress(Exception):
            values = {name: read(self._device) for name, (_, read) in _OF_DRIVER.items()}
            for name, value in values.items():
                yield GaugeMetricFamily(name, _OF_DRIVER[name][0], value=value)

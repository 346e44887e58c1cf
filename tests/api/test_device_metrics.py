"""Metrics of a GPU, told by a stand-in for one and for its driver."""

import pytest
import torch
from prometheus_client import CollectorRegistry

from attention_service.api.observation.device_metrics import DeviceMetrics
from tests.stand_in_gpu import ILLEGAL, stand_in_gpu


@pytest.fixture
def metrics(monkeypatch):
    """The device, and a function that reads its metrics."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 7000)
    stats = {"allocated_bytes": {"all": {"current": 5000, "peak": 6000}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: stats)
    with stand_in_gpu(monkeypatch) as device:
        registry = CollectorRegistry()
        registry.register(DeviceMetrics(device))
        yield device, lambda: {each.name: each.value for family in registry.collect() for each in family.samples}


def test_memory_graphs_and_whether_it_computes(metrics):
    device, read = metrics
    device.unused_pinned = 3000
    device.look_at_pinned(most=2**30)
    device.graphs.captures, device.graphs.replays = 3, 20
    assert read() == {
        "attention_device_lost": 0,
        "attention_cuda_allocated_bytes": 5000,
        "attention_cuda_reserved_bytes": 7000,
        "attention_cuda_pinned_bytes": 3000,
        "attention_cuda_graphs": 0,
        "attention_cuda_graph_bytes": 0,
        "attention_cuda_graph_captures_total": 3,
        "attention_cuda_graph_replays_total": 20,
    }
    device.poison()
    device.give_back_cached()
    assert device.lost == ILLEGAL
    assert read()["attention_device_lost"] == 1


def test_what_the_driver_tells_where_its_library_is_installed(metrics, monkeypatch):
    device, read = metrics
    monkeypatch.setattr(torch.cuda, "utilization", lambda _: 83)
    monkeypatch.setattr(torch.cuda, "temperature", lambda _: 61)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda _: 412_500)
    found = read()
    assert found["attention_cuda_utilization"] == 83
    assert found["attention_cuda_temperature_celsius"] == 61
    assert found["attention_cuda_power_watts"] == 412.5
    device.lost = ILLEGAL
    assert "attention_cuda_utilization" not in read(), "a lost device is not asked"

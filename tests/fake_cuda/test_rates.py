"""The rates of a GPU: which are measured, how, and what they predict."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from attention_contract.schemas.attention import RawForwardRequest
from attention_service.cost import Roofline
from attention_service.cost.datasheet import Datasheet, find
from attention_service.runtime.device import torch_device
from attention_service.runtime.device.torch_device import measure_rates
from attention_service.runtime.operations import forward
from tests.fake_cuda.machine import CUDA, H100

TFLOPS = {torch.float32: 50.0, torch.bfloat16: 700.0, torch.float16: 60.0, torch.float64: 60.0}


@pytest.fixture
def measured(cuda, monkeypatch):
    """Measure the rates of a GPU of this generation, whose products are as fast as ``TFLOPS`` says; and the counts."""

    def of(generation):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (generation, 0))
        monkeypatch.setattr(torch_device, "_product_flops", lambda side, dtype, device: TFLOPS[dtype] * 1e12)
        runs = []

        def median_seconds(work, device):
            before = counts.launches.total()
            work()
            runs.append(counts.launches.total() - before)
            return 1e-6 * max(runs[-1], 20)

        monkeypatch.setattr(torch_device, "_median_seconds", median_seconds)
        with cuda.counted() as counts:
            return measure_rates(CUDA), counts

    return of


def test_products_have_a_rate_for_each_width_of_numbers(measured):
    rates, _ = measured(9)
    assert (rates.flops_per_s, rates.half_flops_per_s, rates.double_flops_per_s) == (50e12, 700e12, 60e12)
    before_bfloat16, _ = measured(7)
    assert before_bfloat16.half_flops_per_s == 60e12, "that of float16"


def test_uploads_are_measured_as_requests_make_them_and_launches_by_themselves(measured):
    rates, counts = measured(9)
    assert counts.uploads
    assert not counts.blocking_uploads, "through pinned memory"
    assert rates.link_bytes_per_s > 0
    assert rates.operation * rates.overhead_s == pytest.approx(1e-6), "64 launches took 64 µs"


@pytest.mark.parametrize("length", [2048, 8192])
def test_bfloat16_is_not_predicted_by_the_rate_of_float32(cuda, length):
    """On a GPU whose half types are 14 times as fast, a long pass is predicted to take less than a fifth."""
    device = cuda.device()
    device.clock = Roofline(replace(H100, half_flops_per_s=14 * H100.flops_per_s))
    query = np.broadcast_to(np.zeros((), np.float32), (1, 32, length, 128))

    def seconds(dtype):
        request = RawForwardRequest(query=query.astype(dtype) if dtype != np.float32 else query)
        return forward.prepare(None, request, device, 2**62).plan.predicted.median

    assert seconds(ml_dtypes.bfloat16) < seconds(np.float32) / 5


def test_an_absent_gpu_is_predicted_by_its_dtype():
    hardware = find("H100 SXM")
    rates = {dtype: Datasheet.of(hardware, dtype).typical.rates for dtype in ("float32", "bfloat16")}
    assert rates["bfloat16"].product_flops_per_s(2) > 10 * rates["float32"].product_flops_per_s(4)
    assert rates["bfloat16"].link_bytes_per_s is not None

"""Requests that are empty, odd or very large, on a device whose clock has learned from runs."""

import numpy as np
import pytest
import torch
from tests.cost.peaks import peaks
from tools.peak_walk import as_on_a_device

from attention_contract.schemas.analyses.hopfield import HopfieldRequest
from attention_contract.schemas.attention import Dropout, RawForwardRequest
from attention_contract.schemas.costs.complexity import RawComplexityRequest, Shape
from attention_contract.schemas.gradients import RawGradientsRequest
from attention_contract.schemas.weights import RawWeightsRequest
from attention_service.cost import Factor, LearnedClock, Rates, Roofline
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import complexity, forward, gradients, hopfield
from attention_service.runtime.operations import weights as inspection
from attention_service.runtime.operations.complexity.subjects import DeviceMemory

FREE_BYTES = 2**40
CLOCK = LearnedClock(
    Roofline(Rates(1e11, 1e10, 5e-5)), {"forward fused float32": Factor(-7.0, -2.0, 0.05, 0.05, -0.1, 0.2)}
)


@pytest.fixture
def device():
    return Device(torch.device("cpu"), "test", 2**34, CLOCK)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 0, 4), (1, 4, 0), (0, 4, 4), (1, 0, 0), (1, 1, 1)])
def test_empty_requests_are_planned(device, batch, queries, keys):
    q, k = np.ones((batch, 2, queries, 8), np.float32), np.ones((batch, 2, keys, 8), np.float32)
    plans = [
        forward.prepare(None, RawForwardRequest(query=q, key=k, value=k), device, FREE_BYTES).plan,
        gradients.prepare(None, RawGradientsRequest(query=q, key=k, value=k, wrt=["query"]), device, FREE_BYTES).plan,
        inspection.prepare(None, RawWeightsRequest(query=q, key=k, value=k), device, FREE_BYTES).plan,
    ]
    if keys:
        plans.append(hopfield.prepare(HopfieldRequest(stored=k, states=q), device).plan)
    for plan in plans:
        assert 0 < plan.predicted.low <= plan.predicted.median <= plan.predicted.high < 1


def test_the_mask_of_what_is_kept_is_admitted_with_the_rest(device):
    x = np.ones((1, 8, 512, 8), np.float32)

    def plan(*, returned, **more):
        dropout = Dropout(p=0.1, return_mask=returned)
        request = RawForwardRequest(query=x, key=x, value=x, dropout=dropout, kernel="blocked", **more)
        return forward.prepare(None, request, device.exact(), FREE_BYTES)

    some = {"heads": [0], "queries": [1, 2]}
    bare, whole, row = plan(returned=False), plan(returned=True), plan(returned=True, select=some)
    with as_on_a_device():
        held = peaks([job.run for job in (bare, whole, row)])
    for job, most in zip((bare, whole, row), held, strict=True):
        assert most <= job.plan.peak_bytes <= 1.02 * most
    assert whole.plan.peak_bytes - bare.plan.peak_bytes >= 2 * 8 * 512 * 512
    assert row.plan.peak_bytes - bare.plan.peak_bytes <= 2 * 2 * 512
    assert bare.prepared.watched
    assert not whole.prepared.watched


def test_what_no_factor_describes_teaches_none(device):
    x = np.ones((1, 2, 8, 4), np.float32)
    assert hopfield.prepare(HopfieldRequest(stored=x, states=x, steps=3), device).prepared.watched
    assert not hopfield.prepare(HopfieldRequest(stored=x, states=x, eps=0.1), device).prepared.watched
    edited = RawForwardRequest(query=x, key=x, value=x, edits=[{"tap": "weights", "set": 0.0}])
    assert not forward.prepare(None, edited, device, FREE_BYTES).prepared.watched
    checked = RawGradientsRequest(query=x, key=x, value=x, wrt=["query"], check=True)
    assert not gradients.prepare(None, checked, device, FREE_BYTES).prepared.watched


@pytest.mark.parametrize("size", [1, 2**26])
def test_sizes_of_any_magnitude_have_a_time(device, size):
    request = RawComplexityRequest(shape=Shape(queries=size), num_heads=1, head_dim=8)
    (cost,) = complexity.report(None, request, DeviceMemory(device, FREE_BYTES, FREE_BYTES)).costs
    for took in (cost.predicted.forward, cost.predicted.gradients, *cost.predicted.encoding.values()):
        assert 0 < took.low_ms <= took.median_ms <= took.high_ms < float("inf")

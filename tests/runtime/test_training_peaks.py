"""Losses of taps, their second gradients and brought parameters against their plans' peak memory."""

import numpy as np
import pytest
import torch
from tests.cost.peaks import peaks

from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.schemas.modules import CreateModule
from attention_service.core.tensors import to_numpy
from attention_service.cost import Rates, Roofline
from attention_service.modules.library import Library
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import compute, gradients

SLACK = 2**16
DEVICE = Device(torch.device("cpu"), "test", 2**34, Roofline(Rates(1e11, 1e10, 1e-5)))
ONES = np.ones((2, 4, 160, 160), np.float32)
ASKED = {
    "a loss of weights": {"tap_upstream": {"weights": ONES}},
    "its second gradients": {
        "tap_upstream": {"weights": ONES},
        "wrt": ["query", "upstream", "tap_upstream.weights"],
        "directions": ["query", "upstream", "tap_upstream.weights"],
    },
    "second gradients of the output": {"wrt": ["query", "parameters", "upstream"], "directions": ["query"]},
    "brought parameters": {"wrt": ["query", "parameters"], "parameters": True},
}


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    """Tensors are brought there, not shared with the request."""
    monkeypatch.setattr(compute, "to_device", lambda x, device, dtype=None: x.to(device, dtype or x.dtype, copy=True))


@pytest.fixture
def module(tmp_path):
    config = {"d_model": 64, "num_heads": 4, "spec": {"masks": [{"name": "causal"}]}}
    return Library(tmp_path, torch.device("cpu")).create(CreateModule(name="m", config=config, durable=False))[0]


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_the_plan_tells_what_is_held(module, asked, rng):
    query = rng.standard_normal((2, 160, 64), np.float32)
    fields = asked | {"query": query}
    if "directions" in asked:
        fields["directions"] = {name: ONES if "weights" in name else query for name in asked["directions"]}
    if "parameters" in asked:
        fields["parameters"] = {name: to_numpy(x) for name, x in module.parameters.items()}
    job = gradients.prepare(module, GradientsRequest(**fields), DEVICE.exact(), 2**40)
    (actual,) = peaks([job.run])
    assert 0.98 * actual - SLACK <= job.plan.peak_bytes <= 1.3 * actual + SLACK

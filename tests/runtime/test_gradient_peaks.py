"""Checked and second gradients against their plans' peak memory, measured by PyTorch's profiler on the CPU."""

from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch
from benchmarks.random_requests import Drawn, Kind, draw, kinds
from tests.cost.peaks import peaks
from tests.runtime.peak_walk import needs_between

from attention_contract.errors import AttentionError
from attention_contract.schemas.gradients import GradientsRequest
from attention_service.core.tensors import to_numpy
from attention_service.cost import Rates, Roofline
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import compute, gradients
from attention_service.runtime.operations import gradient_check as checking
from attention_service.runtime.scheduling.jobs import Job

SLACK = 2**16
DEVICE = Device(torch.device("cpu"), "test", 2**34, Roofline(Rates(1e11, 1e10, 1e-5)))
KINDS = [kind for kind in kinds() if kind.purpose == "gradients"]


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    """Tensors are brought there, not shared with the request; and of each name few numbers are checked."""
    monkeypatch.setattr(compute, "to_device", lambda x, device, dtype=None: x.to(device, dtype or x.dtype, copy=True))
    monkeypatch.setattr(checking, "CHECKED_ELEMENTS", 2)


def drawn_job(kind: Kind, asked: str) -> Job:
    """One that was drawn at random, with this asked beside."""
    rng = np.random.default_rng(sum(map(ord, kind.name)))
    affordable = partial(needs_between, kind.kernel, 2**19, 2**21)
    while True:
        if (drawn := draw(rng, kind, affordable)) is not None:
            with suppress(AttentionError):  # parts that do not go together
                return gradients.prepare(drawn.module, asking(drawn, asked), DEVICE.exact(), 2**40)


def asking(drawn: Drawn, asked: str) -> GradientsRequest:
    """Its request, of a kernel that can do it all."""
    request = drawn.request
    if asked == "check":
        return request.model_copy(update={"check": True, "kernel": None})
    directions = {name: getattr(request, name) for name in request.wrt if name != "parameters"}
    if drawn.module is not None and "parameters" in request.wrt:
        directions |= {name: to_numpy(x) for name, x in drawn.module.parameters.items()}
    return request.model_copy(update={"directions": directions, "kernel": None})


@pytest.mark.parametrize("asked", ["check", "directions"])
@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_the_plan_tells_what_is_held(kind, asked):
    job = drawn_job(kind, asked)
    (actual,) = peaks([job.run])
    least = 0.98 if job.prepared.dtype in {"float32", "float64"} else 0.95  # oneDNN's products of half types hold more
    assert least * actual - SLACK <= job.plan.peak_bytes <= 1.3 * actual + SLACK

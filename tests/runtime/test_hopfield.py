"""A retrieval bound and planned: its sizes by layout, and its peak against what its job allocates."""

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from attention_contract.schemas.hopfield import HopfieldRequest
from attention_service.core.cost import Rates
from attention_service.runtime import hopfield
from attention_service.runtime.device import Device

DEVICE = Device(torch.device("cpu"), "a cpu", 2**34, Rates(1e11, 1e10, 1e-5))


def request(*shapes, dtype=np.float32, **fields):
    rng = np.random.default_rng(0)
    stored, states = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    return HopfieldRequest(stored=stored, states=states, **fields)


def matrix(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32) / 8


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        (request((7, 4), (5, 4)), (1, 1, 5, 7, 4, 1)),
        (request((3, 7, 4), (3, 5, 4), steps=9), (1, 3, 5, 7, 4, 9)),
        (request((2, 3, 7, 4), (2, 3, 5, 4), eps=0.1), (2, 3, 5, 7, 4, 100)),
        (request((2, 7, 12), (2, 5, 12), num_heads=3, eps=0.1, max_steps=8), (2, 3, 5, 7, 4, 8)),
        (request((7, 12), (5, 12), num_heads=3), (1, 3, 5, 7, 4, 1)),
        (
            request((2, 7, 9), (2, 5, 6), projections={"stored": matrix(8, 9), "state": matrix(8, 6)}, num_heads=2),
            (2, 2, 5, 7, 4, 1),
        ),
    ],
)
def test_sizes_are_those_of_the_layout(asked, sizes):
    size = hopfield.bind(asked, DEVICE).size
    assert (size.batch, size.heads, size.states, size.patterns, size.width, size.steps) == sizes


def test_beta_is_by_default_that_of_attention():
    assert hopfield.bind(request((3, 7, 4), (3, 5, 4)), DEVICE).beta == (0.5, 0.5, 0.5)


LAYER = {"state": matrix(128, 96), "stored": matrix(128, 64), "output": matrix(64, 32)}
JOBS = {
    "float32": lambda: request((2, 4, 400, 64), (2, 4, 300, 64), steps=3),
    "float64": lambda: request((2, 4, 400, 64), (2, 4, 300, 64), steps=3, dtype=np.float64),
    "float16": lambda: request((2, 4, 400, 64), (2, 4, 300, 64), steps=3, dtype=np.float16),
    "merged": lambda: request((4, 400, 128), (4, 300, 128), num_heads=4, eps=1e-30, max_steps=4),
    "layer": lambda: request((4, 400, 64), (4, 300, 96), num_heads=4, steps=2, projections=LAYER),
    "masked": lambda: request((2, 2, 3000, 64), (2, 2, 9, 64), stored_mask=np.arange(6000).reshape(2, -1) % 3 > 0),
    "association": lambda: request((2, 2, 900, 16), (2, 2, 900, 16), return_association=True),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_planned_peak_is_what_the_job_allocates(name):
    job = hopfield.prepare(JOBS[name](), DEVICE)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        fields = job.run()
    assert np.isfinite(fields["energy"]).all()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    held = np.cumsum([event.nbytes() for event in events if event.name() == "[memory]"])
    # A CPU shares the memory of the inputs that a device would hold copies of, so the estimate may be above.
    came = sum(array.nbytes for array in (JOBS[name]().states, JOBS[name]().stored))
    assert held.max() <= job.plan.peak_bytes <= 1.6 * (held.max() + came)

"""Plans of Hopfield retrievals: by bucket, bounded, and exact near the limit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_contract.schemas.hopfield import HopfieldRequest
from attention_service.cost import Rates, Roofline
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import hopfield

CLOCK = Roofline(Rates(1e11, 1e10, 1e-5))


def device():
    return Device(torch.device("cpu"), "test", 2**34, CLOCK)


def request(batch=1, states=3, patterns=700, **more):
    def ones(length):
        return np.broadcast_to(np.float32(1), (batch, 2, length, 8))

    return HopfieldRequest(states=ones(states), stored=ones(patterns), **more)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 12), st.integers(1, 700), st.integers(1, 3000), st.booleans())
def test_the_plan_of_a_bucket_bounds_the_exact_one(batch, states, patterns, association):
    sent = request(batch, states, patterns, return_association=association)
    plan, exact = (hopfield.prepare(sent, here).plan for here in (device(), device().exact()))
    assert 0.98 * exact.peak_bytes <= plan.peak_bytes <= max(1.25 * exact.peak_bytes, exact.peak_bytes + 2**25)
    assert plan.flops == exact.flops
    assert plan.predicted.median == pytest.approx(exact.predicted.median, rel=0.15)


def test_retrievals_of_one_bucket_share_their_plan():
    here = device()
    for patterns in range(641, 769):
        hopfield.prepare(request(patterns=patterns), here)
    assert len(here.plans) == 1
    hopfield.prepare(request(patterns=700, return_association=True), here)
    assert len(here.plans) == 2


def test_one_that_fits_exactly_is_not_refused_for_its_bucket():
    exact = hopfield.prepare(request(), device().exact()).plan
    here = device()
    assert hopfield.prepare(request(), here).plan.peak_bytes > exact.peak_bytes
    assert hopfield.prepare(request(), here, exact.peak_bytes).plan == exact

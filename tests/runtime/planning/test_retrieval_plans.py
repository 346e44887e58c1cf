"""Plans of Hopfield retrievals: exact, and remembered by their sizes."""

import numpy as np
import torch

from attention_contract.schemas.analyses.hopfield import HopfieldRequest
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


def test_retrievals_of_the_same_sizes_share_an_exact_plan():
    here = device()
    plan = hopfield.prepare(request(), here).plan
    assert hopfield.prepare(request(), here).plan is plan
    assert len(here.plans) == 1
    for other in (request(patterns=701), request(return_association=True), request(steps=2)):
        assert hopfield.prepare(other, here).plan != plan
    assert len(here.plans) == 4

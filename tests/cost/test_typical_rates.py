"""The file of typical curves: that it is about what is measured today."""

import math

import numpy as np
import torch
from benchmarks.measured_requests import Bench

from attention_service.cost import Rates
from attention_service.cost.curves import features
from attention_service.cost.typical_rates import typical
from attention_service.runtime.device.torch_device import Device

RATES = Rates(flops_per_s=1e11, bytes_per_s=1e10, overhead_s=4e-5)
KNOWN = 0.97
"""Share of their terms; the rest is rare, and told by the device's rates."""


def test_it_is_about_the_terms_that_a_calibration_measures(monkeypatch):
    """Where this fails, terms were given other names: ``python -m benchmarks.typical`` measures them anew."""
    bench = Bench(Device.open("cpu", 1), RATES, 2**26, seed=5)
    monkeypatch.setattr(bench, "_timed", lambda run: ([1.0], []))
    monkeypatch.setattr(bench._probe, "disturbed", lambda: False)
    met = [
        name
        for _ in range(60)
        if (point := bench.next()) is not None
        for term in point.terms
        for name, _ in features(term)
    ]
    names = {*met}
    assert len(names) > 200
    assert len(names & typical("cpu").keys()) >= KNOWN * len(names)


def test_every_factor_is_one_that_can_be():
    logs = np.array([*typical("cpu").values()])
    assert np.isfinite(logs).all()
    assert np.abs(logs).max() < math.log(1e5)


def test_of_other_devices_nothing_is_taken_for_typical():
    assert typical(torch.device("cuda").type) == {}

"""Calibrations whose times grow as no kernel does are not used."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pytest
import torch

from attention_service.cost import Calibrated, Curves, Estimate, Rates, Roofline
from attention_service.cost.terms import forward_terms
from attention_service.cost.typical_rates import typical
from attention_service.runtime.calibration import calibrating, stored
from attention_service.runtime.calibration.calibrating import Calibration, TooBusyError
from attention_service.runtime.calibration.plausibility import _work as work
from attention_service.runtime.calibration.plausibility import implausible_growth
from attention_service.runtime.device.torch_device import Device

RATES = Rates(1e11, 1e10, 1e-5)


@dataclass(frozen=True)
class Power(Roofline):
    """Every pass takes a power of its length."""

    power: float = 2.0

    def forward(self, work, kernel):
        return Estimate.within(1e-9 * work.queries**self.power, 1.2)


def disturbed():
    """The usual curves, but for one term whose largest sizes were measured while the machine was busy."""
    usual = dict(typical("cpu"))
    names = {term.name for term in forward_terms(work("fused", 4096), "fused")}
    for name in names:
        usual |= {f"{name}, size 2^{node}": 3.0 for node in (28, 32)}
    return Calibrated(Curves(RATES, usual), {})


def test_rates_and_what_is_usual_are_plausible():
    assert implausible_growth(Roofline(RATES)) is None
    assert implausible_growth(Calibrated(Curves(RATES, typical("cpu")), {})) is None


@pytest.mark.parametrize("power", [-0.1, 2.6, 2.88])
def test_a_power_that_no_kernel_has_is_not(power):
    assert "forward" in implausible_growth(Power(RATES, power=power))


def test_such_a_calibration_is_thrown_away_when_it_is_fitted(monkeypatch):
    device = Device(torch.device("cpu"), "test", 2**34, Roofline(RATES))
    calibration = Calibration(device, 2**24, seconds=1.0)
    monkeypatch.setattr(calibrating, "FEWEST_POINTS", 0)
    monkeypatch.setattr(calibrating, "fit", lambda *_: disturbed())
    with pytest.raises(TooBusyError, match=r"thrown away, since .* grows as n"):
        calibration.clock()


def test_such_a_calibration_is_not_taken_up_from_the_disk(tmp_path):
    device = Device(torch.device("cpu"), "test", 2**34, Roofline(RATES))
    good = stored.Stored(Calibrated(Curves(RATES, typical("cpu")), {}), datetime.now(UTC), 300)
    stored.save(tmp_path, device, good)
    assert stored.load(tmp_path, device) is not None
    stored.save(tmp_path, device, replace(good, clock=disturbed()))
    assert stored.load(tmp_path, device) is None

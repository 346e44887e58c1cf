"""Predictions for absent hardware, by what its maker states."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from attention_contract.schemas.hardware import HardwareInfo
from attention_service.cost.clock import Basis, Estimate, Roofline
from attention_service.cost.hardware import HARDWARE
from attention_service.cost.retrieval import Retrieval
from attention_service.cost.terms import Form
from attention_service.cost.time import Rates
from attention_service.cost.workload import Workload


@dataclass(frozen=True)
class Datasheet:
    """Clock of an absent device: its peaks, and the shares of them that are commonly reached."""

    best: Roofline
    typical: Roofline
    poor: Roofline
    basis: Basis = field(default="datasheet", init=False)

    @classmethod
    def of(cls, hardware: HardwareInfo, dtype: str) -> "Datasheet":
        """Return the clock for passes in one dtype. Raises KeyError if the datasheet has no rate for it."""
        peak = hardware.tflops[dtype] * 1e12

        def reaching(share: str) -> Roofline:
            flops, bandwidth, overhead_s = (
                HARDWARE.efficiency[share][of] for of in ("flops", "bandwidth", "overhead_s")
            )
            memory, link = (bandwidth * peak_gb_s * 1e9 for peak_gb_s in (hardware.bandwidth_gb_s, hardware.link_gb_s))
            return Roofline(Rates(flops * peak, memory, overhead_s, link), "datasheet")

        return cls(reaching("best"), reaching("typical"), reaching("poor"))

    def forward(self, work: Workload, kernel: str) -> Estimate:
        """Predict from the peaks down to the lower end of the reached shares."""
        return _between(*(clock.forward(work, kernel) for clock in self._clocks))

    def gradients(self, work: Workload, kernel: str, *, twice: bool = False, checks: int = 0) -> Estimate:
        """Predict from the peaks down to the lower end of the reached shares."""
        return _between(*(clock.gradients(work, kernel, twice=twice, checks=checks) for clock in self._clocks))

    def inspection(self, work: Workload, *, named: int = 0) -> Estimate:
        """Predict from the peaks down to the lower end of the reached shares."""
        return _between(*(clock.inspection(work, named=named) for clock in self._clocks))

    def transfer(self, of_bytes: int) -> Estimate:
        """Predict from the link's peak down to the lower end of the reached shares."""
        return _between(*(clock.transfer(of_bytes) for clock in self._clocks))

    def carrying(self, form: Form, read: int, written: int, itemsize: int) -> Estimate:
        """Predict for a typical host of these years, since the host does this work."""
        return _HOST.carrying(form, read, written, itemsize)

    def retrieval(self, retrieval: Retrieval) -> Estimate:
        """Predict from the peaks down to the lower end of the reached shares."""
        return _between(*(clock.retrieval(retrieval) for clock in self._clocks))

    def rated(self, seconds: Callable[[Rates], float]) -> Estimate:
        """Predict from the peaks down to the lower end of the reached shares."""
        return _between(*(clock.rated(seconds) for clock in self._clocks))

    @property
    def _clocks(self) -> tuple[Roofline, Roofline, Roofline]:
        return self.best, self.typical, self.poor


_HOST: Final = Roofline(Rates(1e11, 1e10, 5e-5), "datasheet")


def _between(best: Estimate, typical: Estimate, poor: Estimate) -> Estimate:
    return Estimate(typical.median, best.median, poor.median)

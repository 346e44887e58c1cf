"""Predictions for absent hardware, by what its maker states."""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from attention_contract.schemas.costs.hardware import HardwareInfo, HardwareList
from attention_service.cost.clock import Basis, Estimate, Rates, Roofline
from attention_service.cost.operation_counter import Traffic


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

    def predict(self, counts: Traffic, itemsize: int, kind: str) -> Estimate:
        """Predict from the peaks down to the lower end of the reached shares."""
        return _between(*(clock.predict(counts, itemsize, kind) for clock in self._clocks))

    def rated(self, seconds: Callable[[Rates], float]) -> Estimate:
        """Predict from the peaks down to the lower end of the reached shares."""
        return _between(*(clock.rated(seconds) for clock in self._clocks))

    @property
    def _clocks(self) -> tuple[Roofline, Roofline, Roofline]:
        return self.best, self.typical, self.poor


def _between(best: Estimate, typical: Estimate, poor: Estimate) -> Estimate:
    return Estimate(typical.median, best.median, poor.median)


PATH: Final = Path(__file__).with_name("hardware.toml")


def _read() -> HardwareList:
    data = tomllib.loads(PATH.read_text("utf-8"))
    sources = data.pop("sources")
    for device in data["hardware"]:
        device["sources"] = [sources[name] for name in device["sources"]]
    return HardwareList.model_validate(data)


HARDWARE: Final = _read()


def find(name: str) -> HardwareInfo | None:
    """Find a device by name, in any case and with or without spaces and hyphens; None if there is none."""
    return next((device for device in HARDWARE.hardware if _plain(device.name) == _plain(name)), None)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())

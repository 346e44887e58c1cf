"""The clock of a device on which runs of every kernel have been measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from attention_service.cost.clock import NOTHING, Basis, Estimate, Roofline
from attention_service.cost.curves import Curves
from attention_service.cost.retrieval import Retrieval
from attention_service.cost.terms import (
    Form,
    Term,
    forward_terms,
    gradient_terms,
    inspection_terms,
    reading_terms,
    retrieval_terms,
    transfer_terms,
    writing_terms,
)
from attention_service.cost.time import Rates
from attention_service.cost.workload import Workload

_UNSEEN = log(2.0)
"""Log-width of the bounds around the median for a kind of pass without runs."""
_BEYOND = 0.1
"""Additional width per factor of e by which a pass takes longer than the longest measured run."""


@dataclass(frozen=True)
class Spread:
    """Quantiles of measured over predicted times for one kind of pass."""

    low: float
    high: float
    """Natural logarithms of measured / predicted: one run in twenty is below ``low``, and one above ``high``."""
    longest: float
    """Seconds of the longest run."""


@dataclass(frozen=True)
class Calibrated:
    """Adds up the terms of a pass, each by its curve."""

    curves: Curves
    spreads: Mapping[str, Spread]
    """Spread by kind of pass, such as ``forward fused``; kinds without runs are absent."""
    basis: Basis = "calibrated"

    def forward(self, work: Workload, kernel: str) -> Estimate:
        """Predict from the curves."""
        return self.of(forward_terms(work, kernel), f"forward {kernel}")

    def gradients(self, work: Workload, kernel: str, *, twice: bool = False, checks: int = 0) -> Estimate:
        """Predict from the curves."""
        return self.of(gradient_terms(work, kernel, twice=twice, checks=checks), f"gradients {kernel}")

    def inspection(self, work: Workload, *, named: int = 0) -> Estimate:
        """Predict from the curves."""
        return self.of(inspection_terms(work, named=named), "weights materialized")

    def transfer(self, of_bytes: int) -> Estimate:
        """Predict from the curves."""
        if self.curves.rates.link_bytes_per_s is None:
            return NOTHING
        return self.of(transfer_terms(of_bytes), "transfer")

    def carrying(self, form: Form, read: int, written: int, itemsize: int) -> Estimate:
        """Predict from the curves."""
        reading = self.of(reading_terms(form, read, itemsize), f"read {form}")
        return reading + self.of(writing_terms(form, written, itemsize), f"write {form}")

    def retrieval(self, retrieval: Retrieval) -> Estimate:
        """Predict from the curves."""
        return self.of(retrieval_terms(retrieval), "hopfield materialized")

    def rated(self, seconds: Callable[[Rates], float]) -> Estimate:
        """Predict from the device's rates."""
        return Roofline(self.curves.rates).rated(seconds)

    def of(self, terms: Sequence[Term], kind: str) -> Estimate:
        """Predict any pass from its terms and its kind."""
        seconds = self.curves.seconds(terms)
        spread = self.spreads.get(kind)
        if spread is None:
            return Estimate.within(seconds, exp(_UNSEEN))
        beyond = _BEYOND * log(max(seconds / spread.longest, 1.0))
        return Estimate(seconds, seconds * exp(spread.low - beyond), seconds * exp(spread.high + beyond))

"""The clock of a device on which runs of every kernel have been measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from attention_service.cost.clock import NOTHING, Basis, Estimate
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
from attention_service.cost.workload import Workload

_UNSEEN = log(2.0)
"""How far from the median the bounds are for a kind of pass of which there are no runs."""
_BEYOND = 0.1
"""How much further, for each factor of e by which a pass takes longer than any that was measured."""


@dataclass(frozen=True)
class Spread:
    """How far single runs of one kind of pass lie from what is predicted."""

    low: float
    high: float
    """Natural logarithms of measured / predicted, which one run in twenty is below and above."""
    longest: float
    """Seconds of the longest run."""


@dataclass(frozen=True)
class Calibrated:
    """Adds up the terms of a pass, each by its curve."""

    curves: Curves
    spreads: Mapping[str, Spread]
    """By kind of pass, as in ``forward fused``; none of those that were not run."""
    basis: Basis = "calibrated"

    def forward(self, work: Workload, kernel: str) -> Estimate:
        """By the curves."""
        return self.of(forward_terms(work, kernel), f"forward {kernel}")

    def gradients(self, work: Workload, kernel: str, *, twice: bool = False, checks: int = 0) -> Estimate:
        """By the curves."""
        return self.of(gradient_terms(work, kernel, twice=twice, checks=checks), f"gradients {kernel}")

    def inspection(self, work: Workload, *, named: int = 0) -> Estimate:
        """By the curves."""
        return self.of(inspection_terms(work, named=named), "weights materialized")

    def transfer(self, of_bytes: int) -> Estimate:
        """By the curves."""
        if self.curves.rates.link_bytes_per_s is None:
            return NOTHING
        return self.of(transfer_terms(of_bytes), "transfer")

    def carrying(self, form: Form, read: int, written: int, itemsize: int) -> Estimate:
        """By the curves."""
        reading = self.of(reading_terms(form, read, itemsize), f"read {form}")
        return reading + self.of(writing_terms(form, written, itemsize), f"write {form}")

    def retrieval(self, retrieval: Retrieval) -> Estimate:
        """By the curves."""
        return self.of(retrieval_terms(retrieval), "hopfield materialized")

    def of(self, terms: Sequence[Term], kind: str) -> Estimate:
        """Of any pass, by its terms and its kind."""
        seconds = self.curves.seconds(terms)
        spread = self.spreads.get(kind)
        if spread is None:
            return Estimate.within(seconds, exp(_UNSEEN))
        beyond = _BEYOND * log(max(seconds / spread.longest, 1.0))
        return Estimate(seconds, seconds * exp(spread.low - beyond), seconds * exp(spread.high + beyond))

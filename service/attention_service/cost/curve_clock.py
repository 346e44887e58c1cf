"""The clock of a device whose typical efficiency is known: each term of a pass by its curve."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class CurveClock:
    """Adds up the terms of a pass."""

    curves: Curves
    basis: Basis = "rates"
    factor: float = 2.0
    """Ratio of the upper bound to the median."""

    def forward(self, work: Workload, kernel: str) -> Estimate:
        """Predict from the curves."""
        return self.of(forward_terms(work, kernel))

    def gradients(self, work: Workload, kernel: str, *, twice: bool = False, checks: int = 0) -> Estimate:
        """Predict from the curves."""
        return self.of(gradient_terms(work, kernel, twice=twice, checks=checks))

    def inspection(self, work: Workload, *, named: int = 0) -> Estimate:
        """Predict from the curves."""
        return self.of(inspection_terms(work, named=named))

    def transfer(self, of_bytes: int) -> Estimate:
        """Predict from the curves."""
        return NOTHING if self.curves.rates.link_bytes_per_s is None else self.of(transfer_terms(of_bytes))

    def carrying(self, form: Form, read: int, written: int, itemsize: int) -> Estimate:
        """Predict from the curves."""
        return self.of(reading_terms(form, read, itemsize)) + self.of(writing_terms(form, written, itemsize))

    def retrieval(self, retrieval: Retrieval) -> Estimate:
        """Predict from the curves."""
        return self.of(retrieval_terms(retrieval))

    def rated(self, seconds: Callable[[Rates], float]) -> Estimate:
        """Predict from the device's rates."""
        return Roofline(self.curves.rates).rated(seconds)

    def of(self, terms: Sequence[Term]) -> Estimate:
        """Predict any pass from its terms."""
        return Estimate.within(self.curves.seconds(terms), self.factor)

"""Predictions of another clock, times factors learned from requests that ran on the device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp
from typing import Final

from attention_service.core.kernels.materialized import MATERIALIZED
from attention_service.cost.clock import Basis, Clock, Estimate
from attention_service.cost.retrieval import Retrieval
from attention_service.cost.terms import Form
from attention_service.cost.time import Rates
from attention_service.cost.workload import Workload

_DTYPES: Final = {2: "bfloat16", 4: "float32", 8: "float64"}


@dataclass(frozen=True)
class Factor:
    """Quantiles of measured over predicted time, as natural logarithms."""

    middle: float
    """Half of the runs take longer than predicted times e to this power."""
    low: float
    """One run in twenty is below ``middle + low``."""
    high: float
    """One run in twenty is above ``middle + high``."""

    def applied(self, seconds: float) -> Estimate:
        """Return the estimate for a prediction without the factor."""
        median = seconds * exp(self.middle)
        return Estimate(median, median * exp(self.low), median * exp(self.high))


def kind_of(computation: str, kernel: str, dtype: str) -> str:
    """The kind of passes that share a factor."""
    return f"{computation} {kernel} {dtype}"


@dataclass(frozen=True)
class LearnedClock:
    """Corrects the predictions of another clock."""

    base: Clock
    factors: Mapping[str, Factor]
    """The kind → factor table, by ``kind_of``; kinds that did not run are absent."""
    basis: Basis = "calibrated"

    def forward(self, work: Workload, kernel: str) -> Estimate:
        """Predict from the other clock and the factor."""
        return self._corrected(self.base.forward(work, kernel), kind_of("forward", kernel, _dtype(work)))

    def gradients(self, work: Workload, kernel: str, *, twice: bool = False, checks: int = 0) -> Estimate:
        """Predict from the other clock and the factor."""
        estimate = self.base.gradients(work, kernel, twice=twice, checks=checks)
        return self._corrected(estimate, kind_of("gradients", kernel, _dtype(work)))

    def inspection(self, work: Workload, *, named: int = 0) -> Estimate:
        """Predict from the other clock and the factor."""
        estimate = self.base.inspection(work, named=named)
        return self._corrected(estimate, kind_of("weights", MATERIALIZED, _dtype(work)))

    def transfer(self, of_bytes: int) -> Estimate:
        """Predict from the other clock."""
        return self.base.transfer(of_bytes)

    def carrying(self, form: Form, read: int, written: int, itemsize: int) -> Estimate:
        """Predict from the other clock."""
        return self.base.carrying(form, read, written, itemsize)

    def retrieval(self, retrieval: Retrieval) -> Estimate:
        """Predict from the other clock and the factor."""
        kind = kind_of("hopfield", MATERIALIZED, _DTYPES[retrieval.itemsize])
        return self._corrected(self.base.retrieval(retrieval), kind)

    def rated(self, seconds: Callable[[Rates], float]) -> Estimate:
        """Predict from the other clock."""
        return self.base.rated(seconds)

    def _corrected(self, estimate: Estimate, kind: str) -> Estimate:
        factor = self.factors.get(kind)
        return estimate if factor is None else factor.applied(estimate.median)


def _dtype(work: Workload) -> str:
    return "float16" if work.half else _DTYPES[work.itemsize]

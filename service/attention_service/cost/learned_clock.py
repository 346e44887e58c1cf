"""Predictions of another clock, times factors learned from requests that ran on the device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp

from attention_service.cost.clock import Basis, Clock, Estimate, Rates
from attention_service.cost.operation_counter import Traffic


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

    def predict(self, counts: Traffic, itemsize: int, kind: str) -> Estimate:
        """Predict from the other clock and the factor."""
        estimate, factor = self.base.predict(counts, itemsize, kind), self.factors.get(kind)
        return estimate if factor is None else factor.applied(estimate.median)

    def rated(self, seconds: Callable[[Rates], float]) -> Estimate:
        """Predict from the other clock."""
        return self.base.rated(seconds)

"""Predicted time of a pass with its uncertainty: the protocol of clocks, and the roofline clock."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from attention_contract.schemas import accuracy
from attention_service.core.kernels.materialized import MATERIALIZED
from attention_service.cost.curves import Curves
from attention_service.cost.flops import SECOND_PASSES
from attention_service.cost.retrieval import Retrieval
from attention_service.cost.terms import Form, reading_terms, writing_terms
from attention_service.cost.time import (
    Rates,
    predicted_gradient_seconds,
    predicted_retrieval_seconds,
    predicted_seconds,
)
from attention_service.cost.workload import Workload

Basis = accuracy.Basis


@dataclass(frozen=True)
class Estimate:
    """Predicted seconds."""

    median: float
    """Half of the runs take longer."""
    low: float
    high: float
    """Nine of ten runs lie between ``low`` and ``high``; as many lie below as above."""

    def __add__(self, other: "Estimate") -> "Estimate":
        """Add two consecutive times as if both were slow together: the bounds are rather too wide."""
        return Estimate(self.median + other.median, self.low + other.low, self.high + other.high)

    @classmethod
    def within(cls, median: float, factor: float) -> "Estimate":
        """Return bounds from the median divided by ``factor`` to the median times ``factor``."""
        return cls(median, median / factor, median * factor)


NOTHING = Estimate(0.0, 0.0, 0.0)


class Clock(Protocol):
    """Predicts the time of each pass on one device."""

    @property
    def basis(self) -> Basis:
        """Source of the predictions: runs of each kernel, measured rates, or a datasheet."""

    def forward(self, work: Workload, kernel: str) -> Estimate:
        """Predict one forward pass with this kernel, with the taps that it recomputes."""

    def gradients(self, work: Workload, kernel: str, *, twice: bool = False, checks: int = 0) -> Estimate:
        """Predict a forward and a backward pass; ``twice``: differentiated again; ``checks``: float64 passes."""

    def inspection(self, work: Workload, *, named: int = 0) -> Estimate:
        """Predict the statistics of all queries' weights, the requested weights, and ``named`` keys per query."""

    def transfer(self, of_bytes: int) -> Estimate:
        """Predict a transfer of bytes between host and device; zero if they share their memory."""

    def carrying(self, form: Form, read: int, written: int, itemsize: int) -> Estimate:
        """Predict the time to read a request's numbers and to write a reply's, in one form of the wire."""

    def retrieval(self, retrieval: Retrieval) -> Estimate:
        """Predict one Hopfield retrieval, with the maximum number of steps."""

    def rated(self, seconds: Callable[[Rates], float]) -> Estimate:
        """Predict work that no factor is learned for, from its seconds at the device's rates."""


@dataclass(frozen=True)
class Roofline:
    """Clock that knows a device's rates alone: the slower of arithmetic and traffic."""

    rates: Rates
    basis: Basis = "rates"
    factor: float = 3.0
    """Ratio of the upper bound to the median. A bare roofline is occasionally this inaccurate."""

    def forward(self, work: Workload, kernel: str) -> Estimate:
        """Predict from the rates."""
        return Estimate.within(predicted_seconds(work, kernel, self.rates), self.factor)

    def gradients(self, work: Workload, kernel: str, *, twice: bool = False, checks: int = 0) -> Estimate:
        """Predict from the rates."""
        forward = predicted_seconds(work, kernel, self.rates)
        seconds = predicted_gradient_seconds(work, kernel, self.rates)
        seconds += SECOND_PASSES * twice * (seconds - forward)
        if checks:
            seconds += checks * predicted_seconds(replace(work, itemsize=8), MATERIALIZED, self.rates)
        return Estimate.within(seconds, self.factor)

    def inspection(self, work: Workload, *, named: int = 0) -> Estimate:
        """Predict from the rates: the weights, and the traffic of five statistics for each pair."""
        statistics = 5 * 2 * 8 * work.pairs * work.heads / self.rates.bytes_per_s
        rows = (1 + (named > 0)) * predicted_seconds(work, MATERIALIZED, self.rates)
        return Estimate.within(rows + statistics, self.factor)

    def transfer(self, of_bytes: int) -> Estimate:
        """Predict from the rate of the link."""
        if self.rates.link_bytes_per_s is None:
            return NOTHING
        return Estimate.within(of_bytes / self.rates.link_bytes_per_s + self.rates.overhead_s, self.factor)

    def carrying(self, form: Form, read: int, written: int, itemsize: int) -> Estimate:
        """Predict from the device's rates, which stand in for the host's."""
        terms = [*reading_terms(form, read, itemsize), *writing_terms(form, written, itemsize)]
        return Estimate.within(Curves(self.rates).seconds(terms), self.factor)

    def retrieval(self, retrieval: Retrieval) -> Estimate:
        """Predict from the rates."""
        return Estimate.within(predicted_retrieval_seconds(retrieval, self.rates), self.factor)

    def rated(self, seconds: Callable[[Rates], float]) -> Estimate:
        """Predict from the rates."""
        return Estimate.within(seconds(self.rates), self.factor)

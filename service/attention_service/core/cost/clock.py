"""How long a pass should take, and how sure that is: what a clock answers, and the plainest of clocks."""

from dataclasses import dataclass, replace
from typing import Protocol

from attention_contract.schemas import accuracy
from attention_service.core.cost.flops import SECOND_PASSES
from attention_service.core.cost.retrieval import Retrieval, predicted_retrieval_seconds
from attention_service.core.cost.time import Rates, predicted_gradient_seconds, predicted_seconds
from attention_service.core.cost.workload import Workload

Basis = accuracy.Basis


@dataclass(frozen=True)
class Estimate:
    """Seconds that something should take."""

    median: float
    """As often exceeded as not."""
    low: float
    high: float
    """Nine of ten runs should lie between ``low`` and ``high``, and as many below as above."""

    @classmethod
    def within(cls, median: float, factor: float) -> "Estimate":
        """From a ``factor``-th of the median to ``factor`` times it."""
        return cls(median, median / factor, median * factor)


class Clock(Protocol):
    """Predicts the time of each pass on one device."""

    @property
    def basis(self) -> Basis:
        """What the predictions rest on: runs of each kernel, two rates and a start, or what a maker says."""

    def forward(self, work: Workload, kernel: str) -> Estimate:
        """One forward pass with this kernel, the taps that are computed again included."""

    def gradients(self, work: Workload, kernel: str, *, twice: bool = False, checks: int = 0) -> Estimate:
        """One forward and one backward pass; ``twice``: differentiated again; ``checks``: forward passes in float64."""

    def retrieval(self, retrieval: Retrieval) -> Estimate:
        """One Hopfield retrieval, with every step that it may take."""


@dataclass(frozen=True)
class Roofline:
    """A clock that knows no more than a device's rates: the arithmetic or the traffic, whichever is slower."""

    rates: Rates
    basis: Basis = "rates"
    factor: float = 3.0
    """How far from the median the bounds are. A bare roofline is out by this much now and then."""

    def forward(self, work: Workload, kernel: str) -> Estimate:
        """By the rates."""
        return Estimate.within(predicted_seconds(work, kernel, self.rates), self.factor)

    def gradients(self, work: Workload, kernel: str, *, twice: bool = False, checks: int = 0) -> Estimate:
        """By the rates."""
        forward = predicted_seconds(work, kernel, self.rates)
        seconds = predicted_gradient_seconds(work, kernel, self.rates)
        seconds += SECOND_PASSES * twice * (seconds - forward)
        if checks:
            seconds += checks * predicted_seconds(replace(work, itemsize=8), "materialized", self.rates)
        return Estimate.within(seconds, self.factor)

    def retrieval(self, retrieval: Retrieval) -> Estimate:
        """By the rates."""
        return Estimate.within(predicted_retrieval_seconds(retrieval, self.rates), self.factor)

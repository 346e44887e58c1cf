"""How long a pass should take, and how sure that is: what a clock answers, and the plainest of clocks."""

from dataclasses import dataclass, replace
from typing import Protocol

from attention_contract.schemas import accuracy
from attention_service.core.kernels.materialized import MATERIALIZED
from attention_service.cost.curves import Curves
from attention_service.cost.flops import SECOND_PASSES
from attention_service.cost.retrieval import Retrieval, predicted_retrieval_seconds
from attention_service.cost.terms import Form, reading_terms, writing_terms
from attention_service.cost.time import Rates, predicted_gradient_seconds, predicted_seconds
from attention_service.cost.workload import Workload

Basis = accuracy.Basis


@dataclass(frozen=True)
class Estimate:
    """Seconds that something should take."""

    median: float
    """As often exceeded as not."""
    low: float
    high: float
    """Nine of ten runs should lie between ``low`` and ``high``, and as many below as above."""

    def __add__(self, other: "Estimate") -> "Estimate":
        """One after the other, as if both were slow together: the bounds are rather too wide."""
        return Estimate(self.median + other.median, self.low + other.low, self.high + other.high)

    @classmethod
    def within(cls, median: float, factor: float) -> "Estimate":
        """From a ``factor``-th of the median to ``factor`` times it."""
        return cls(median, median / factor, median * factor)


NOTHING = Estimate(0.0, 0.0, 0.0)


class Clock(Protocol):
    """Predicts the time of each pass on one device."""

    @property
    def basis(self) -> Basis:
        """What the predictions rest on: runs of each kernel, two rates and a start, or what a maker says."""

    def forward(self, work: Workload, kernel: str) -> Estimate:
        """One forward pass with this kernel, the taps that are computed again included."""

    def gradients(self, work: Workload, kernel: str, *, twice: bool = False, checks: int = 0) -> Estimate:
        """One forward and one backward pass; ``twice``: differentiated again; ``checks``: forward passes in float64."""

    def inspection(self, work: Workload, *, named: int = 0) -> Estimate:
        """Statistics of the weights of every query, the weights that are among the taps, and so many keys by name."""

    def transfer(self, of_bytes: int) -> Estimate:
        """So many bytes between the host and the device; nothing where they share their memory."""

    def carrying(self, form: Form, read: int, written: int, itemsize: int) -> Estimate:
        """Reading a request's tensors and writing a reply's, of so many numbers, in one of the forms of the wire."""

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
            seconds += checks * predicted_seconds(replace(work, itemsize=8), MATERIALIZED, self.rates)
        return Estimate.within(seconds, self.factor)

    def inspection(self, work: Workload, *, named: int = 0) -> Estimate:
        """By the rates: the weights, and for each pair as much traffic again as five statistics take."""
        statistics = 5 * 2 * 8 * work.pairs * work.heads / self.rates.bytes_per_s
        rows = (1 + (named > 0)) * predicted_seconds(work, MATERIALIZED, self.rates)
        return Estimate.within(rows + statistics, self.factor)

    def transfer(self, of_bytes: int) -> Estimate:
        """By the rate of the link."""
        if self.rates.link_bytes_per_s is None:
            return NOTHING
        return Estimate.within(of_bytes / self.rates.link_bytes_per_s + self.rates.overhead_s, self.factor)

    def carrying(self, form: Form, read: int, written: int, itemsize: int) -> Estimate:
        """By the rates of the host, as far as they are those of the device."""
        terms = [*reading_terms(form, read, itemsize), *writing_terms(form, written, itemsize)]
        return Estimate.within(Curves(self.rates).seconds(terms), self.factor)

    def retrieval(self, retrieval: Retrieval) -> Estimate:
        """By the rates."""
        return Estimate.within(predicted_retrieval_seconds(retrieval, self.rates), self.factor)

"""Predicted time of a pass with its uncertainty: a roofline of what a rehearsal counted.

Source: Williams et al. 2009, the roofline model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp, log
from typing import Literal, Protocol

from attention_contract.schemas.costs import accuracy
from attention_service.cost.operation_counter import Traffic

Basis = accuracy.Basis
Form = Literal["list", "base64", "safetensors"]
"""Form of a tensor on the wire: numbers as text, bytes as text, or raw bytes."""
FORMS: tuple[Form, ...] = ("list", "base64", "safetensors")
_TEXT_S, _ENCODED_S, _RAW_PASSES = 1e-7, 2e-9, 4
"""Seconds to read or write one number as text and one byte in base64; copies of a raw byte."""


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

    def times(self, factor: float) -> "Estimate":
        """Scale the time."""
        return Estimate(factor * self.median, factor * self.low, factor * self.high)

    @classmethod
    def within(cls, median: float, factor: float) -> "Estimate":
        """Return bounds from the median divided by ``factor`` to the median times ``factor``."""
        return cls(median, median / factor, median * factor)


NOTHING = Estimate(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Rates:
    """Rates of a device, as measured on it."""

    flops_per_s: float
    """Floating-point operations a second in a large matrix product."""
    bytes_per_s: float
    """Bytes read and written a second in a large copy."""
    overhead_s: float
    """Seconds to start one attention, however small."""
    link_bytes_per_s: float | None = None
    """Bytes a second between the host and a device with memory of its own; None if they share memory."""
    half_flops_per_s: float | None = None
    """Floating-point operations a second in a product of half types: a fiftieth of those of float32 on some CPUs, and 5
    to 20 times those on a GPU with tensor cores; None if they are as many."""
    double_flops_per_s: float | None = None
    """Floating-point operations a second in a product of float64; None if they are as many as in float32."""
    reached: float = 1.0
    """Share of ``bytes_per_s`` that counted bytes reach: each operand counts at every use."""
    function_flops: float = 0.0
    """FLOPs of a product that take as long as one elementary function."""
    overlaps: bool = True
    """True if arithmetic and traffic run at the same time, as on a GPU."""
    starts: float = 1.0
    """Smallest attentions that bind, upload and collect a request."""
    operation: float = 1 / 16
    """One operation, in smallest attentions."""

    def product_flops_per_s(self, itemsize: int) -> float:
        """Floating-point operations a second in a product of numbers of this many bytes."""
        own = {2: self.half_flops_per_s, 8: self.double_flops_per_s}.get(itemsize)
        return self.flops_per_s if own is None else own

    def seconds(self, counts: Traffic, itemsize: int) -> float:
        """Return the time of so many operations on numbers of this many bytes."""
        whole, half = self.product_flops_per_s(max(itemsize, 4)), self.product_flops_per_s(2)
        computing = (counts.products - counts.half_products) / whole + counts.half_products / half
        computing += self.function_flops * counts.transcendentals / self.flops_per_s
        moving = counts.moved / (self.reached * self.bytes_per_s)
        working = max(computing, moving) if self.overlaps else computing + moving
        return working + (self.starts + self.operation * counts.operations) * self.overhead_s


class Clock(Protocol):
    """Predicts times on one device."""

    @property
    def basis(self) -> Basis:
        """Source of the predictions: runs of each kernel, measured rates, or a datasheet."""

    def predict(self, counts: Traffic, itemsize: int, kind: str) -> Estimate:
        """Predict a pass of so many operations on numbers of this many bytes. ``kind``: as ``kind_of`` says."""

    def rated(self, seconds: Callable[[Rates], float]) -> Estimate:
        """Predict work that no factor is learned for, from its seconds at the device's rates."""


@dataclass(frozen=True)
class Roofline:
    """Clock that knows a device's rates alone."""

    rates: Rates
    basis: Basis = "rates"
    factor: float = 3.0
    """Ratio of the upper bound to the median. A bare roofline is occasionally this inaccurate."""

    def predict(self, counts: Traffic, itemsize: int, kind: str) -> Estimate:
        """Predict from the rates."""
        return Estimate.within(self.rates.seconds(counts, itemsize), self.factor)

    def rated(self, seconds: Callable[[Rates], float]) -> Estimate:
        """Predict from the rates."""
        return Estimate.within(seconds(self.rates), self.factor)


def transfer(clock: Clock, of_bytes: int) -> Estimate:
    """Predict a transfer of bytes between host and device; zero if they share their memory."""

    def seconds(rates: Rates) -> float:
        return 0.0 if rates.link_bytes_per_s is None else of_bytes / rates.link_bytes_per_s + rates.overhead_s

    return clock.rated(seconds)


def carrying(clock: Clock, form: Form, numbers: int, itemsize: int) -> Estimate:
    """Predict the time to read a request's numbers and to write a reply's, in one form of the wire.

    The host does this work. That of an absent device is taken for a typical one of these years.
    """
    host = Roofline(_HOST, clock.basis) if clock.basis == "datasheet" else clock
    match form:
        case "list":
            return host.rated(lambda rates: numbers * _TEXT_S + 2 * rates.overhead_s)
        case "base64":
            return host.rated(lambda rates: numbers * itemsize * _ENCODED_S + 2 * rates.overhead_s)
    return host.rated(lambda rates: _RAW_PASSES * numbers * itemsize / rates.bytes_per_s + 2 * rates.overhead_s)


_HOST = Rates(1e11, 1e10, 5e-5)


@dataclass(frozen=True)
class Factor:
    """Measured over predicted time, as natural logarithms.

    Short runs err otherwise than long ones. The median is therefore a line over the logarithm of the predicted time,
    from the shortest to the longest run that was seen, and constant beyond both.
    """

    shortest: float
    """Logarithm of the predicted seconds of the shortest run."""
    longest: float
    """The same of the longest one; may be equal."""
    short: float
    """Median at ``shortest``."""
    long: float
    """Median at ``longest``."""
    low: float
    """One run in twenty is below the median by more than this negative number."""
    high: float
    """One run in twenty is above the median by more than this."""

    def applied(self, seconds: float) -> Estimate:
        """Return the estimate for a prediction without the factor."""
        median = seconds * exp(self.middle(seconds))
        return Estimate(median, median * exp(self.low), median * exp(self.high))

    def middle(self, seconds: float) -> float:
        """Return the median for a prediction without the factor."""
        return self._between(log(seconds), self.shortest, self.longest)

    def undone(self, seconds: float) -> float:
        """Return the prediction without the factor, from the median with it."""
        corrected = log(seconds)
        return exp(corrected - self._between(corrected, self.shortest + self.short, self.longest + self.long))

    def _between(self, place: float, first: float, last: float) -> float:
        share = min(max((place - first) / (last - first), 0.0), 1.0) if last > first else 0.0
        return self.short + share * (self.long - self.short)


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

"""Efficiency curves: the rate of each kind of work as a function of its size.

The roofline model (Williams et al. 2009) has one rate for arithmetic and one for traffic. Here each term of a pass has
its own, and its logarithm is piecewise linear in the logarithm of the size, with factors for other influences. The
device's rates replace those of work that was never measured.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, log

from attention_service.cost.terms import Term
from attention_service.cost.time import Rates

_SIZES = tuple(range(8, 36, 4))
_ROWS = tuple(range(0, 15, 3))
"""Nodes of the piecewise linear curves, as logarithms to base 2; beyond the ends the rate is constant."""
_STARTS_OF_A_CALL = 4
_PASSES = {"byte": 4, "element": 8}
_HALF = 2.4
"""Rate of products of half types over that of float32 on the processor of the typical curves, which has instructions
for them: those curves say how much faster than float32 they are there."""
_TEXT_S, _ENCODED_S = 1e-7, 2e-9
"""Guesses for work that was never measured: steps that share the start of a call, bytes moved per counted byte or per
element, and the seconds to read or write one number as text, or a byte in base64."""


def features(term: Term) -> Iterator[tuple[str, float]]:
    """Yield the features of a term's rate by name, each with its amount. The first is the term itself."""
    yield term.name, 1.0
    for kind, value, nodes in (("size", term.size, _SIZES), ("row", term.row, _ROWS)):
        if value is not None:
            for node, share in _steps(value, nodes):
                yield f"{term.name}, {kind} 2^{node}", share
    for mark in term.marks:
        yield f"{term.name}, {mark}", 1.0
    for name, value in term.slopes:
        yield f"{term.name}, {name}", value


def _steps(value: float, nodes: tuple[int, ...]) -> Iterator[tuple[int, float]]:
    """Yield the share of each step between the middle node and a value, by the node at its far end."""
    middle = len(nodes) // 2
    for way in (nodes[middle:], nodes[middle::-1]):
        for near, far in pairwise(way):
            if (gone := (value - near) / (far - near)) > 0:
                yield far, min(gone, 1.0)


@dataclass(frozen=True)
class Curves:
    """Measurements of one device."""

    rates: Rates
    """Rates that replace missing measurements."""
    logs: Mapping[str, float] = field(default_factory=dict)
    """Natural logarithm of a factor on the guessed seconds of each term with a feature, by feature."""

    def seconds(self, terms: Iterable[Term]) -> float:
        """Sum the seconds of all terms."""
        return sum(self._of(term) for term in terms if term.amount > 0)

    def _of(self, term: Term) -> float:
        logs = self.logs
        learned = sum(logs[name] * value for name, value in features(term) if name in logs)
        return exp(guess(term, self.rates) + learned)


def guess(term: Term, rates: Rates) -> float:
    """Return the logarithm of a term's seconds by the device's rates alone."""
    match term.unit:
        case "start":
            each = rates.overhead_s / _STARTS_OF_A_CALL
        case "flop":
            each = 1 / rates.flops_per_s
        case "half flop":
            half = rates.half_flops_per_s
            each = 1 / rates.flops_per_s if half is None else _HALF / half
        case "text":
            each = _TEXT_S
        case "encoded":
            each = _ENCODED_S
        case "link":
            each = 1 / (rates.link_bytes_per_s or rates.bytes_per_s)
        case _:
            each = _PASSES[term.unit] / rates.bytes_per_s
    return log(term.amount) + log(each)

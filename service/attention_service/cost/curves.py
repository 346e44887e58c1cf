"""Efficiency curves: how fast each kind of work is done, as it depends on how much of it there is at a time.

The roofline model (Williams et al. 2009) has one rate for arithmetic and one for traffic. Here each term of a pass has
its own, and its logarithm is piecewise linear in the logarithm of the size, with factors for what else makes a
difference. Of what was never measured, the device's rates stand in.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, log

from attention_service.cost.terms import Term
from attention_service.cost.time import Rates

_SIZES = tuple(range(8, 36, 4))
_ROWS = tuple(range(0, 15, 3))
"""Where the lines of the curves meet, as logarithms to base 2; beyond the ends the rate stays what it is there."""
_STARTS_OF_A_CALL = 4
_PASSES = {"byte": 4, "element": 8}
_TEXT_S, _ENCODED_S = 1e-7, 2e-9
"""What is guessed of work that was never measured: how many steps share the start of a call, how many bytes are moved
for each that is counted, or for each element, and the seconds to read or write one number as text, or a byte in
base64."""


def features(term: Term) -> Iterator[tuple[str, float]]:
    """What a term's rate depends on, by name, and how much of each there is. The first is the term itself."""
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
    """How much of each step is gone from the middle node to a value, by the node at its far end."""
    middle = len(nodes) // 2
    for way in (nodes[middle:], nodes[middle::-1]):
        for near, far in pairwise(way):
            if (gone := (value - near) / (far - near)) > 0:
                yield far, min(gone, 1.0)


@dataclass(frozen=True)
class Curves:
    """What was measured on one device."""

    rates: Rates
    """By which what was not measured is guessed."""
    logs: Mapping[str, float] = field(default_factory=dict)
    """By feature: the natural logarithm of a factor on the guessed seconds of each term that has it."""

    def seconds(self, terms: Iterable[Term]) -> float:
        """Of all of them, one after the other."""
        return sum(self._of(term) for term in terms if term.amount > 0)

    def _of(self, term: Term) -> float:
        logs = self.logs
        learned = sum(logs[name] * value for name, value in features(term) if name in logs)
        return exp(guess(term, self.rates) + learned)


def guess(term: Term, rates: Rates) -> float:
    """The logarithm of a term's seconds by the device's rates alone."""
    match term.unit:
        case "start":
            each = rates.overhead_s / _STARTS_OF_A_CALL
        case "flop":
            each = 1 / rates.flops_per_s
        case "text":
            each = _TEXT_S
        case "encoded":
            each = _ENCODED_S
        case "link":
            each = 1 / (rates.link_bytes_per_s or rates.bytes_per_s)
        case _:
            each = _PASSES[term.unit] / rates.bytes_per_s
    return log(term.amount) + log(each)

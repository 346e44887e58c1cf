"""A term: the amount of one kind of work in one pass, and the variables of its rate."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import log2
from typing import Literal

from attention_service.cost.workload import Workload

Unit = Literal["start", "flop", "half flop", "byte", "element", "text", "encoded", "link"]


@dataclass(frozen=True)
class Term:
    """Work of one kind. Its time is its amount by a rate, which depends on the other fields."""

    name: str
    unit: Unit
    """Unit of the amount. A half flop is one of half types; a start is the constant cost of an operation; text is
    counted by its numbers, encoded data by its bytes; a link carries bytes between host and device."""
    amount: float
    size: float | None = None
    """Logarithm to base 2 of the work done at a time; None if the rate does not depend on it."""
    row: float | None = None
    """Logarithm to base 2 of the number of contiguous keys; None if the rate does not depend on it."""
    marks: tuple[str, ...] = ()
    """Names that change the rate by a factor."""
    slopes: tuple[tuple[str, float], ...] = ()
    """Names and logarithms to base 2 that change the rate by a power."""


def lg(amount: float) -> float:
    """Return the logarithm to base 2, of 1 and more."""
    return log2(max(amount, 1.0))


def start(name: str, times: float = 1.0) -> Term:
    """Return the constant cost of an operation."""
    return Term(f"start {name}", "start", times)


_ROWS = 5
"""Logarithm to base 2: a product with more rows than this is one of matrices, not of a matrix and vectors."""


def product(
    name: str, flops: float, depth: int, work: Workload, matrices: int = 1, rows: int = 2**_ROWS, *, wide: bool = False
) -> Term:
    """Return ``matrices`` matrix products of ``rows`` rows, whose sums have ``depth`` terms.

    wide: half types are multiplied in float32.
    """
    of_one = flops / max(matrices, 1)
    slopes = (("depth", lg(depth) - 6), ("matrices", lg(matrices) - 3), ("rows", min(lg(rows), _ROWS) - _ROWS))
    unit: Unit = "half flop" if work.itemsize == 2 and not wide else "flop"
    return Term(f"product {name}", unit, flops, lg(of_one), marks=(_dtype(work),), slopes=slopes)


def moved(name: str, of_bytes: float, work: Workload) -> Term:
    """Return the traffic of tokens that are computed, copied or read."""
    return Term(f"bytes {name}", "byte", of_bytes, lg(of_bytes), marks=(_dtype(work),))


def over_pairs(name: str, of_bytes: float, work: Workload, *, at_once: float | None = None) -> Term:
    """Return the traffic of query-key pairs in one step, all at once or ``at_once`` at a time."""
    size = of_bytes if at_once is None else at_once
    return Term(f"pairs {name}", "byte", of_bytes, lg(size), lg(work.keys), marks=(_dtype(work),))


def elements(name: str, amount: float, *, at_once: float | None = None, marks: tuple[str, ...] = ()) -> Term:
    """Return numbers that are computed, independent of their width."""
    return Term(f"elements {name}", "element", amount, lg(amount if at_once is None else at_once), marks=marks)


def _dtype(work: Workload) -> str:
    return f"{8 * work.itemsize} bits"


def backward(terms: Iterable[Term]) -> Iterator[Term]:
    """Yield the same amounts of the backward pass, which has rates of its own."""
    return (replace(term, name=f"{term.name}, backward") for term in terms)

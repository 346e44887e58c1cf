"""A term: one kind of work in one pass, as much of it as there is, and what its speed depends on."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import log2
from typing import Literal

from attention_service.cost.workload import Workload

Unit = Literal["start", "flop", "byte", "element", "text", "encoded", "link"]


@dataclass(frozen=True)
class Term:
    """Work of one kind. Its time is its amount, by a rate that depends on the rest."""

    name: str
    unit: Unit
    """What it is counted in. A start is what is paid before the first number, whatever the size; text is counted by its
    numbers, what is encoded by its bytes; a link carries bytes between host and device."""
    amount: float
    size: float | None = None
    """How much is done at a time, as a logarithm to base 2; None where that makes no difference."""
    row: float | None = None
    """How many keys lie side by side, as a logarithm to base 2; None where that makes no difference."""
    marks: tuple[str, ...] = ()
    """What makes the rate another one by a factor."""
    slopes: tuple[tuple[str, float], ...] = ()
    """What makes the rate another one by a power: names, and logarithms to base 2."""


def lg(amount: float) -> float:
    """Logarithm to base 2, of 1 and more."""
    return log2(max(amount, 1.0))


def start(name: str, times: float = 1.0) -> Term:
    """What is paid before the first number."""
    return Term(f"start {name}", "start", times)


_ROWS = 5
"""As a logarithm to base 2: with more rows than this, a product is one of matrices, not of a matrix and vectors."""


def product(name: str, flops: float, depth: int, work: Workload, matrices: int = 1, rows: int = 2**_ROWS) -> Term:
    """Matrix products: so many of them, of ``rows`` rows, of which each sums over ``depth``."""
    of_one = flops / max(matrices, 1)
    slopes = (("depth", lg(depth) - 6), ("matrices", lg(matrices) - 3), ("rows", min(lg(rows), _ROWS) - _ROWS))
    return Term(f"product {name}", "flop", flops, lg(of_one), marks=(_dtype(work),), slopes=slopes)


def moved(name: str, of_bytes: float, work: Workload) -> Term:
    """Bytes of tokens that are made, copied or read."""
    return Term(f"bytes {name}", "byte", of_bytes, lg(of_bytes), marks=(_dtype(work),))


def over_pairs(name: str, of_bytes: float, work: Workload, *, at_once: float | None = None) -> Term:
    """Bytes of query-key pairs that one step goes through, all at once or so many at a time."""
    size = of_bytes if at_once is None else at_once
    return Term(f"pairs {name}", "byte", of_bytes, lg(size), lg(work.keys), marks=(_dtype(work),))


def elements(name: str, amount: float, *, at_once: float | None = None, marks: tuple[str, ...] = ()) -> Term:
    """Numbers that are computed, whatever their width."""
    return Term(f"elements {name}", "element", amount, lg(amount if at_once is None else at_once), marks=marks)


def _dtype(work: Workload) -> str:
    return f"{8 * work.itemsize} bits"


def backward(terms: Iterable[Term]) -> Iterator[Term]:
    """The same amounts on the way back, whose rates are their own."""
    return (replace(term, name=f"{term.name}, backward") for term in terms)

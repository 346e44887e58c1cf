"""Fit of efficiency curves to measured runs, by robust regression."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from attention_service.cost import CurveClock, Curves, Rates, Term
from attention_service.cost.curves import features, guess

Numbers = NDArray[np.float64]

_FREE, _CURVED, _MARKED, _SLOPED = 2.0, 0.7, 0.4, 0.35
"""Prior standard deviations of natural logarithms: of a rate around its guess, and of the effects of size and rows, of
marks and of slopes."""
_NEARER = 0.25
"""Share of them that remains as deviation from the typical rate, if that is known."""
_NOISE, _TAILS = 0.08, 8.0
"""Scale of a run's noise as a natural logarithm, and the degrees of freedom of Student's distribution."""
_STEPS, _ENOUGH, _LONGEST_STEP = 25, 1e-2, 1.5


@dataclass(frozen=True)
class Point:
    """Measured runs of one pass."""

    kind: str
    """Kind of the pass, such as ``forward fused``."""
    terms: tuple[Term, ...]
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of its runs."""
        return float(np.median(self.seconds))


def fit(points: Sequence[Point], rates: Rates, typical: Mapping[str, float] = MappingProxyType({})) -> CurveClock:
    """Return a clock that predicts the medians of these points.

    Maximum a posteriori estimate: errors of logarithms have Student's distribution, so that a disturbed run weighs
    little, and logarithms of rates have a normal prior around the typical rate, or around the guess if that is not
    known. The method is Gauss-Newton with weights (Lange et al. 1989, section 3).
    Raises ValueError without points.
    """
    if not points:
        raise ValueError("there is nothing to fit a clock to; expected at least one point")
    design = _Design(points, rates, typical)
    logs = _most_probable(design, design.means)
    found = zip(design.columns, logs.tolist(), strict=True)
    return CurveClock(Curves(rates, {**typical, **dict(found)}))


class _Design:
    """The points as arrays: entries of a sparse matrix of features, a row for each term."""

    def __init__(self, points: Sequence[Point], rates: Rates, typical: Mapping[str, float]) -> None:
        self.columns: dict[str, int] = {}
        expected: list[float] = []
        rows: list[int] = []
        columns: list[int] = []
        values: list[float] = []
        owners: list[int] = []
        guesses: list[float] = []
        for owner, point in enumerate(points):
            for term in point.terms:
                for name, value in features(term):
                    if name not in self.columns:
                        self.columns[name] = len(self.columns)
                        expected.append(_expected(name, term) * (_NEARER if name in typical else 1.0))
                    rows.append(len(owners))
                    columns.append(self.columns[name])
                    values.append(value)
                owners.append(owner)
                guesses.append(guess(term, rates))
        self.rows, self.cols = np.array(rows), np.array(columns)
        self.values, self.owners = np.array(values), np.array(owners)
        self.guesses, self.precision = np.array(guesses), 1 / np.square(expected)
        self.means = np.array([typical.get(name, 0.0) for name in self.columns])
        self.measured = np.log([point.median for point in points])

    def terms(self, logs: Numbers) -> Numbers:
        """Return the seconds of each term."""
        learned = np.bincount(self.rows, self.values * logs[self.cols], len(self.owners))
        return np.exp(self.guesses + learned)

    def predicted(self, logs: Numbers) -> Numbers:
        """Return the logarithm of each point's seconds."""
        return np.log(np.bincount(self.owners, self.terms(logs), len(self.measured)))

    def slopes(self, logs: Numbers) -> NDArray[np.float32]:
        """Return ∂ predicted / ∂ logs, a row for each point; float32 suffices for a step, in half the time."""
        of_terms = self.terms(logs)
        shares = of_terms / np.bincount(self.owners, of_terms, len(self.measured))[self.owners]
        into = self.owners[self.rows] * len(self.columns) + self.cols
        flat = np.bincount(into, self.values * shares[self.rows], len(self.measured) * len(self.columns))
        return flat.astype(np.float32).reshape(len(self.measured), len(self.columns))


def _expected(feature: str, term: Term) -> float:
    if feature == term.name:
        return _FREE
    told = feature.removeprefix(f"{term.name}, ")
    if told.startswith(("size ", "row ")):
        return _CURVED
    return _MARKED if told in term.marks else _SLOPED


def _most_probable(design: _Design, logs: Numbers) -> Numbers:
    """Optimize the logarithms from a first guess."""
    for _ in range(_STEPS):
        off = design.measured - design.predicted(logs)
        weights = ((_TAILS + 1) / (_TAILS + np.square(off / _NOISE)) / _NOISE**2).astype(np.float32)
        slopes = design.slopes(logs)
        curvature = (slopes.T * weights) @ slopes + np.diag(design.precision)
        step = np.linalg.solve(curvature, slopes.T @ (weights * off) - design.precision * (logs - design.means))
        largest = float(np.abs(step).max())
        logs = logs + step * min(1.0, _LONGEST_STEP / largest)
        if largest < _ENOUGH:
            break
    return logs

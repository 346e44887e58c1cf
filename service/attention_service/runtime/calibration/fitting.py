"""Fit of a calibrated clock to measured runs: efficiency curves by robust regression, and the spread of the runs."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from attention_service.core.cancellation import checkpoint
from attention_service.cost import Calibrated, Curves, Rates, Spread, Term
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
_FOLDS, _STEPS_OF_A_FOLD = 5, 4
_TWENTIETH = 0.05
_FEW = 60
"""With this many runs, the bounds of a kind lie half-way to those of all kinds."""


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


def fit(points: Sequence[Point], rates: Rates, typical: Mapping[str, float] = MappingProxyType({})) -> Calibrated:
    """Return a clock that predicts the medians of these points, and whose bounds hold nine of ten of their runs.

    Maximum a posteriori estimate: errors of logarithms have Student's distribution, so that a disturbed run weighs
    little, and logarithms of rates have a normal prior around the typical rate, or around the guess if that is not
    known. The method is Gauss-Newton with weights (Lange et al. 1989, section 3). The bounds are quantiles of the
    residuals under cross-validation, which leaves out a few points at a time (Stone 1974).
    Raises ValueError without points.
    """
    if not points:
        raise ValueError("there is nothing to fit a clock to; expected at least one point")
    design = _Design(points, rates, typical)
    logs = _most_probable(design, design.means, np.ones(len(points), bool))
    predicted = np.empty(len(points))
    folds = np.arange(len(points)) * _FOLDS // len(points)  # side by side in time: disturbances are shared
    for fold in range(_FOLDS):
        out = folds == fold
        predicted[out] = design.predicted(_most_probable(design, logs, ~out, _STEPS_OF_A_FOLD))[out]
    found = zip(design.columns, logs.tolist(), strict=True)
    return Calibrated(Curves(rates, {**typical, **dict(found)}), _spreads(points, predicted))


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


def _most_probable(design: _Design, logs: Numbers, used: NDArray[np.bool_], steps: int = _STEPS) -> Numbers:
    """Optimize the logarithms for the points that are used, from a first guess."""
    for _ in range(steps):
        checkpoint()
        off = design.measured - design.predicted(logs)
        weights = (used * (_TAILS + 1) / (_TAILS + np.square(off / _NOISE)) / _NOISE**2).astype(np.float32)
        slopes = design.slopes(logs)
        curvature = (slopes.T * weights) @ slopes + np.diag(design.precision)
        step = np.linalg.solve(curvature, slopes.T @ (weights * off) - design.precision * (logs - design.means))
        largest = float(np.abs(step).max())
        logs = logs + step * min(1.0, _LONGEST_STEP / largest)
        if largest < _ENOUGH:
            break
    return logs


def _spreads(points: Sequence[Point], predicted: Numbers) -> dict[str, Spread]:
    """Return the bounds of each kind."""
    off: dict[str, list[float]] = defaultdict(list)
    longest: dict[str, float] = defaultdict(float)
    for point, log_seconds in zip(points, predicted.tolist(), strict=True):
        off[point.kind] += [math.log(seconds) - log_seconds for seconds in point.seconds]
        longest[point.kind] = max(longest[point.kind], point.median)
    counts = Counter(point.kind for point in points)
    common = np.quantile([x for each in off.values() for x in each], _levels(len(points)))
    spreads = {}
    for kind, each in off.items():
        share = len(each) / (len(each) + _FEW)
        low, high = share * np.quantile(each, _levels(counts[kind])) + (1 - share) * common
        spreads[kind] = Spread(min(float(low), 0.0), max(float(high), 0.0), longest[kind])
    return spreads


def _levels(points: int) -> tuple[float, float]:
    """Return the quantiles of this many points between which the next lies nine times in ten (Vovk et al. 2005)."""
    above = min(1.0, (1 - _TWENTIETH) * (1 + 1 / points))
    return 1 - above, above

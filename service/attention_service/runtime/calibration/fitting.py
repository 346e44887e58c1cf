"""From measured runs to a calibrated clock: efficiency curves by robust regression, and how far runs lie from them."""

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
"""How far, as a natural logarithm, a rate is expected to be from the guess; and what its size and rows, its marks and
its slopes are expected to make of it."""
_NEARER = 0.25
"""As a share of that, how far it is expected to be from what is typical, where that is known."""
_NOISE, _TAILS = 0.08, 8.0
"""Of a run: the scale of its noise as a natural logarithm, and the degrees of freedom of Student's distribution."""
_STEPS, _ENOUGH, _LONGEST_STEP = 25, 1e-2, 1.5
_FOLDS, _STEPS_OF_A_FOLD = 5, 4
_TWENTIETH = 0.05
_FEW = 60
"""Of so many runs, the bounds of a kind lie half-way to those of all."""


@dataclass(frozen=True)
class Point:
    """One pass, and what runs of it took."""

    kind: str
    """As in ``forward fused``."""
    terms: tuple[Term, ...]
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of its runs."""
        return float(np.median(self.seconds))


def fit(points: Sequence[Point], rates: Rates, typical: Mapping[str, float] = MappingProxyType({})) -> Calibrated:
    """A clock that predicts the medians of these points, and whose bounds hold nine of ten of their runs.

    The most probable rates: errors of logarithms have Student's distribution, so that a run that was disturbed weighs
    little, and logarithms of rates are normal about what is typical, or about the guess where that is not known. Found
    by Gauss-Newton steps with weights (Lange et al. 1989, section 3). The bounds are quantiles of how far runs are from
    what is predicted without them, the points being left out a few at a time (cross-validation: Stone 1974). Raises
    ValueError without points.
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
        """Seconds of each term."""
        learned = np.bincount(self.rows, self.values * logs[self.cols], len(self.owners))
        return np.exp(self.guesses + learned)

    def predicted(self, logs: Numbers) -> Numbers:
        """The logarithm of each point's seconds."""
        return np.log(np.bincount(self.owners, self.terms(logs), len(self.measured)))

    def slopes(self, logs: Numbers) -> NDArray[np.float32]:
        """∂ predicted / ∂ logs, a row for each point; exact enough for the way to a step, at half the time."""
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
    """From a first guess of the logarithms to the best ones for the points that are used."""
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
    """The bounds of each kind."""
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
    """The quantiles of so many points that the next one lies between nine times in ten (Vovk et al. 2005)."""
    above = min(1.0, (1 - _TWENTIETH) * (1 + 1 / points))
    return 1 - above, above

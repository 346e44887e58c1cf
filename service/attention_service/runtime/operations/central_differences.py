"""Derivatives by central differences, whose step is chosen by convergence, and the verdict on a gradient beside them.

Source: Ridders 1982, Accurate computation of F′(x) and F′(x)F″(x).
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final

from attention_contract.schemas.gradients import GradientCheck

CHECK_FLOOR: Final = 1e-3
"""Below this, errors are taken relative to it: central differences have about ten digits after the point, no more."""
TOLERANCE: Final = 1e-6
"""Relative error up to which a gradient passes."""
_LEAST_CERTAIN: Final = 1e-4
"""Relative error of differences from which on they say nothing of a gradient."""
_SHRINK, _ROUNDS, _LEAST_ROUNDS = 8, 16, 3
"""Divisor of the step in each round; rounds at most, and before differences can have converged."""


@dataclass(frozen=True)
class Derivative:
    """A derivative by central differences."""

    value: float
    error: float
    """The estimated error: how far extrapolations from different steps are apart."""


def derivative(
    difference: Callable[[float], float], step: float, least: float, rounding: float, enough: float, expected: float
) -> Derivative:
    """Differentiate by the quotients ``difference`` of a step: see ``converging``."""
    run = converging(step, least, rounding, enough, expected)
    try:
        step = next(run)
        while True:
            step = run.send(difference(step))
    except StopIteration as end:
        result: Derivative = end.value
        return result


def converging(
    step: float, least: float, rounding: float, enough: float, expected: float
) -> Generator[float, float, Derivative]:
    """Differentiate by quotients of ever smaller steps, extrapolated to a step of 0.

    Yields a step h, and is sent the quotient (f(x + h) − f(x − h)) / 2h. ``step`` is the first, ``least`` the smallest,
    ``rounding`` the rounding error of f. Extrapolations that agree within ``enough`` have converged, and those of the
    smallest steps count. If none do, the two that differ least count. The rounds end once the differences have
    converged to the ``expected`` derivative: a gradient of high curvature gets smaller steps, a wrong gradient all.
    """
    row = [(yield step)]
    best = Derivative(math.nan, math.inf)
    for number in range(2, _ROUNDS + 1):
        step /= _SHRINK
        if step < least:
            break
        previous, row = row, [(yield step)]
        if math.isnan(row[0]) or (row[0] == 0 and abs(previous[0]) > enough):  # the step is lost in rounding
            break
        for order, coarse in enumerate(previous, 1):
            row.append(row[-1] + (row[-1] - coarse) / (_SHRINK ** (2 * order) - 1))
        own = min(map(_extrapolated, row[1:], row, previous), key=lambda estimate: estimate.error)
        most = max(enough, best.error) if rounding <= enough * step else best.error
        if number >= _LEAST_ROUNDS and own.error <= most:
            best = own
        if best.error <= enough and abs(best.value - expected) <= 10 * enough:
            break
    return best


def _extrapolated(value: float, finer: float, coarser: float) -> Derivative:
    return Derivative(value, max(abs(value - finer), abs(value - coarser)))


def verdict(expected: Sequence[float], numeric: Sequence[Derivative]) -> GradientCheck:
    """Hold derivatives of a gradient against central differences."""
    finite = [difference.value for difference in numeric if math.isfinite(difference.value)]
    largest = max([CHECK_FLOOR, *map(abs, expected), *map(abs, finite)])
    errors = [abs(difference.value - own) for difference, own in zip(numeric, expected, strict=True)]
    worst = max((error if math.isfinite(error) else math.inf for error in errors), default=0.0)  # max passes over NaN
    passed = all(
        error <= max(TOLERANCE * largest, difference.error) and difference.error <= _LEAST_CERTAIN * largest
        for error, difference in zip(errors, numeric, strict=True)
    )
    return GradientCheck(
        max_absolute_error=worst,
        max_relative_error=worst / largest if math.isfinite(worst) else math.inf,
        elements=len(errors),
        passed=passed,
    )

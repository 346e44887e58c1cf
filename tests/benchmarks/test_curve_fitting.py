"""Curves fitted to runs whose truth is known."""

import numpy as np
import pytest
from benchmarks.curve_fitting import Point, fit

from attention_service.cost import Rates, Term

RATES = Rates(flops_per_s=1e11, bytes_per_s=1e10, overhead_s=4e-5)


def terms(kind, flops, moved, depth):
    return (
        Term(f"start {kind}", "start", 1),
        Term(f"product {kind}", "flop", flops, np.log2(flops), slopes=(("depth", np.log2(depth) - 6),)),
        Term(f"bytes {kind}", "byte", moved, np.log2(moved)),
    )


def truth(kind, flops, moved, depth):
    """A device whose products are slow where they are small, and whose memory is slow beyond a cache."""
    factor = 1.0 if kind == "forward a" else 1.7
    efficiency = 0.1 + 0.7 / (1 + (1e6 / flops)) * (depth / 64) ** 0.2
    bandwidth = 3e10 if moved < 1e6 else 8e9
    return factor * (3e-5 + flops / (1e11 * efficiency) + moved / bandwidth)


def drawn(rng, count, noise=0.05, disturbed=0.0):
    points, medians = [], []
    for index in range(count):
        kind = ("forward a", "gradients b")[index % 2]
        flops, moved = 10 ** rng.uniform(4, 9), 10 ** rng.uniform(3, 8)
        depth = 2 ** rng.integers(4, 8)
        median = truth(kind, flops, moved, depth)
        runs = median * np.exp(noise * rng.standard_normal(3))
        if rng.random() < disturbed:
            runs *= 8
        points.append(Point(kind, terms(kind, flops, moved, depth), tuple(runs)))
        medians.append(median)
    return points, np.array(medians)


def test_what_was_not_measured_is_predicted_within_the_noise():
    rng = np.random.default_rng(1)
    clock = fit(drawn(rng, 600)[0], RATES)
    points, medians = drawn(rng, 400)
    predicted = np.array([clock.of(point.terms).median for point in points])
    errors = np.abs(predicted / medians - 1)
    assert np.median(errors) < 0.05
    assert np.quantile(errors, 0.95) < 0.2


def test_what_is_typical_stands_in_for_what_few_points_tell():
    """Of another processor, whose memory is half as fast where there is much of it, and which is slower throughout."""
    rng = np.random.default_rng(6)

    def elsewhere(point):
        factor = 1.5 if point.terms[2].amount > 1e5 else 1.2
        return Point(point.kind, point.terms, tuple(factor * seconds for seconds in point.seconds))

    typical = fit([elsewhere(point) for point in drawn(rng, 2000)[0]], RATES).curves.logs
    points, medians = drawn(rng, 400)
    few = drawn(rng, 10)[0]
    usual = []
    for clock in (fit(few, RATES), fit(few, RATES, typical)):
        errors = np.abs(np.array([clock.of(point.terms).median for point in points]) / medians - 1)
        usual.append(np.quantile(errors, 0.9))
    assert usual[1] < 0.75 * usual[0]


def test_disturbed_runs_weigh_little():
    rng = np.random.default_rng(3)
    clock = fit(drawn(rng, 600, disturbed=0.08)[0], RATES)
    points, medians = drawn(rng, 300)
    errors = np.array([clock.of(point.terms).median for point in points]) / medians - 1
    assert np.median(np.abs(errors)) < 0.06
    assert abs(np.median(errors)) < 0.04


def test_nothing_to_fit_is_refused():
    with pytest.raises(ValueError, match="at least one point"):
        fit([], RATES)

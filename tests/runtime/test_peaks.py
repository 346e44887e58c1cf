"""Requests of registered combinations as they are served: their plans' peak memory against what they hold."""

import numpy as np
import pytest
from benchmarks.random_specs import approximations
from tools.peak_walk import Served, combinations, held, off_by, served

from attention_service.core.masks import MASKS
from attention_service.core.normalizers import NORMALIZERS
from attention_service.core.positions import POSITIONS
from attention_service.core.scores import SCORES

SHARES = [0.05, pytest.param(1.0, marks=pytest.mark.slow)]
"""Of 1.2 % of all combinations; ``python -m tools.peak_walk`` goes through each."""
UNDER, OVER = 0.02, 0.30
"""The workspace of operators is bounded, a few blocks stand for all, and which states settle first is not known."""


@pytest.fixture(scope="module", params=SHARES)
def walked(request: pytest.FixtureRequest) -> list[tuple[Served, int]]:
    """Some of them, and the most bytes that each held at a time."""
    rng = np.random.default_rng(0)
    share: float = request.param
    every = [
        found
        for parts in combinations(["forward", "weights", "gradients", "hopfield"])
        if rng.random()
        < share * (0.15 if parts.kind.purpose == "hopfield" or parts.kind.kernel in approximations() else 0.012)
        if (found := served(parts)) is not None
    ]
    return [*zip(every, held(every), strict=True)]


@pytest.mark.slow
def test_a_plan_tells_what_is_held(walked):
    off = []
    for each, actual in walked:
        if not -UNDER <= (error := off_by(each.job.plan.peak_bytes, actual)) <= OVER:
            off.append((round(error, 3), each.parts, each.described))
    assert not off


@pytest.mark.slow
@pytest.mark.parametrize("walked", [1.0], indirect=True)
def test_the_walk_comes_by_every_entry_of_every_registry(walked):
    parts = [each.parts for each, _ in walked]
    for registry, found in (
        (SCORES, {each.score for each in parts}),
        (MASKS, {each.mask for each in parts} - {None}),
        (POSITIONS, {each.position for each in parts}),
        (NORMALIZERS, {each.normalizer for each in parts}),
    ):
        assert found == {entry.name for entry in registry}
    assert {*approximations()} <= {each.kind.kernel for each in parts}
    assert {each.kind.purpose for each in parts} == {"forward", "weights", "gradients", "hopfield"}

"""The peak estimates against measured ones over random combinations of what is registered."""

from collections import defaultdict

import pytest
from tests.cost.peak_walk import Pass, off_by, passes
from tests.cost.peaks import peaks

pytestmark = pytest.mark.slow
DRAWN = 60
UNDER, OVER = 0.02, 0.05


@pytest.fixture(scope="module")
def walked() -> list[tuple[Pass, int]]:
    """Each pass, and the most bytes that it held at a time."""
    every = [*passes(DRAWN)]
    return [*zip(every, peaks([each.run for each in every]), strict=True)]


def test_peak_of_any_combination_is_what_is_allocated(walked):
    off = []
    for each, actual in walked:
        if not -UNDER <= off_by(each, actual) <= OVER:
            off.append((each.way, each.kernel, each.number, round(off_by(each, actual), 3)))
    assert not off


def test_the_walk_comes_by_every_kind_of_entry(walked):
    works = [each.work for each, _ in walked if each.way == "second"]
    assert len(works) == DRAWN
    names = defaultdict(set)
    for work in works:
        spec = work.spec
        for part in (spec.score, spec.normalizer, spec.position, *spec.masks):
            names[type(part).__mro__[1]].add(part.name)
    assert sum(map(len, names.values())) > 15
    assert {work.itemsize for work in works} == {2, 4, 8}
    assert {bool(work.apart) for work in works} == {bool(work.offsets) for work in works} == {True, False}

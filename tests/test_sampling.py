"""Samples of parametrized tests have one of each value, and what was slow before stays slow."""

from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace

import pytest

from tests.sampling import mark_unsampled


@dataclass(eq=False)
class Case:
    """The part of a ``pytest.Function`` that sampling reads and marks."""

    params: dict
    markers: dict = field(default_factory=dict)
    nodeid: str = "test_of.py::test_it[case]"

    @property
    def callspec(self):
        return SimpleNamespace(params=self.params)

    def get_closest_marker(self, name):
        return self.markers.get(name)

    def add_marker(self, name):
        self.markers[name] = pytest.mark.slow.mark


def sampled(*params, **wanted):
    return [Case(each, {"sampled": pytest.mark.sampled(**wanted).mark}) for each in params]


def fast(cases):
    mark_unsampled(cases)
    return [each.params for each in cases if "slow" not in each.markers]


def test_a_product_keeps_each_value_once():
    kept = fast(sampled(*({"first": first, "second": second} for first, second in product(range(3), "ab"))))
    assert len(kept) == 3
    assert {each["first"] for each in kept} == {0, 1, 2}
    assert {each["second"] for each in kept} == {"a", "b"}


def test_a_walk_keeps_as_many_values_as_its_marker_says():
    assert fast(sampled(*({"kind": kind} for kind in range(9)), kind=3)) == [{"kind": 0}, {"kind": 4}, {"kind": 8}]
    assert fast(sampled(*({"kind": kind} for kind in range(2)), kind=3)) == [{"kind": 0}, {"kind": 1}]


def test_what_is_slow_already_is_no_case_of_the_sample():
    cases = sampled(*({"kind": kind} for kind in range(4)), kind=1)
    cases[0].add_marker("slow")
    assert fast(cases) == [{"kind": 1}]


def test_what_has_no_marker_stays_whole():
    assert len(fast([Case({"kind": kind}) for kind in range(5)])) == 5


def test_a_parameter_that_does_not_exist_is_named():
    with pytest.raises(pytest.UsageError, match="knid"):
        mark_unsampled(sampled({"kind": 1}, {"kind": 2}, knid=1))

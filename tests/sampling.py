"""The marker ``sampled``: a few cases of a parametrized test run in ``make test``; the others are slow.

The sample has one of each value of each parameter. ``@pytest.mark.sampled(kind=3)`` asks for three values of ``kind``,
evenly spaced in its list: for walks over models, where the entries of a registry are walked elsewhere.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest


def mark_unsampled(items: Iterable[Any]) -> None:
    """Mark the cases outside the samples ``slow``. What is slow already is in no sample."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") is not None and item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one in cases.values():
        for item in set(of_one) - _sample(of_one):
            item.add_marker("slow")


def _sample(cases: list[Any]) -> set[Any]:
    """The fewest cases, found greedily, with each wanted value of each parameter."""
    marker = cases[0].get_closest_marker("sampled")
    values: dict[str, dict[int, None]] = defaultdict(dict)  # in the order of the cases
    for case in cases:
        for name, value in case.callspec.params.items():
            values[name][id(value)] = None
    if unknown := marker.kwargs.keys() - values.keys():
        raise pytest.UsageError(f"{cases[0].nodeid}: sampled() names no parameter: {sorted(unknown)}")
    wanted = {(name, key) for name, keys in values.items() for key in _spaced(list(keys), marker.kwargs.get(name))}
    sample: set[Any] = set()
    while wanted:
        best = max(cases, key=lambda case: len(wanted & _values(case)))
        sample.add(best)
        wanted -= _values(best)
    return sample


def _values(case: Any) -> set[tuple[str, int]]:
    return {(name, id(value)) for name, value in case.callspec.params.items()}


def _spaced(keys: list[int], count: int | None) -> list[int]:
    """``count`` of the keys, the first and the last among them; all where ``count`` is None."""
    if count is None or count >= len(keys):
        return keys
    return [keys[at * (len(keys) - 1) // max(count - 1, 1)] for at in range(count)]

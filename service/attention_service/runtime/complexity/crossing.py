"""From which size on one of two costs less than the other: found on the model, by bisection."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations
from typing import Literal, NamedTuple

from attention_contract.errors import InvalidRequest, KernelUnsuitable
from attention_contract.schemas.answers import Crossover
from attention_service.core import cost
from attention_service.core.cost import Estimate
from attention_service.runtime.complexity.subjects import Subject

STEPS = 64
"""Places of an octave: neighbours differ by about a hundredth."""
FAR = {"batch": 2**12}
"""How far each size is searched at least, where it is not as far as a length."""
LENGTHS = 2**20
TOKENS = frozenset({"length", "batch", "queries", "keys", "past"})


class Point(NamedTuple):
    """The cost of one subject at one size."""

    time: Estimate
    peak_bytes: int
    flops: int


Quantity = Literal["time", "peak_bytes", "flops"]
Curve = Callable[[int], Point]
Less = Callable[[int], bool]


def crossovers(subjects: Sequence[Subject], dimension: str, values: Sequence[int]) -> list[Crossover]:
    """Of each two subjects, for time, peak memory and FLOPs of the forward pass.

    Lengths and batches are searched far beyond ``values``, in steps of a hundredth; a width is looked at where
    ``values`` has it, since most others can't be.
    """
    places = lattice(dimension, values)
    curves = [_curve(subject, dimension) for subject in subjects]
    found = []
    for one, other in combinations(range(len(subjects)), 2):
        both = (curves[one], curves[other])
        possible = _possible(both, places)
        if not possible:
            continue
        pair = _Pair((subjects[one].label, subjects[other].label), both, dimension, possible)
        found += [pair.of_time(), pair.of_number("peak_bytes"), pair.of_number("flops")]
    return found


def lattice(dimension: str, values: Sequence[int]) -> list[int]:
    """The sizes at which one is compared with another, in order."""
    if dimension not in TOKENS:
        return sorted(set(values))
    last = max(*values, FAR.get(dimension, LENGTHS))
    places = {round(2 ** (step / STEPS)) for step in range(STEPS * last.bit_length() + 1)}
    return sorted(place for place in places | {last} if place <= last)


def _curve(subject: Subject, dimension: str) -> Curve:
    @cache
    def point(value: int) -> Point:
        work = subject.at(dimension, value)
        kernel = subject.kernel_of(work)
        return Point(
            subject.place.device.clock.forward(work, kernel),
            cost.peak_bytes(work, kernel),
            cost.executed_flops(work, kernel),
        )

    return point


def _possible(curves: tuple[Curve, Curve], places: list[int]) -> list[int]:
    """Up to where both can be: a spec may have room for so many tokens."""

    def can(index: int) -> bool:
        try:
            return all(curve(places[index]) for curve in curves)
        except (InvalidRequest, KernelUnsuitable):
            return False

    return places[: _first(lambda index: not can(index), 0, len(places))]


class _Pair:
    """Two curves along the same sizes."""

    def __init__(self, labels: tuple[str, str], curves: tuple[Curve, Curve], dimension: str, places: list[int]) -> None:
        self._labels = labels
        self._curves = curves
        self._dimension = dimension
        self._places = places

    def of_number(self, what: Quantity) -> Crossover:
        """Where one begins to need less memory, or fewer FLOPs."""
        return self._crossover(what, lambda point: float(getattr(point, what)))

    def of_time(self) -> Crossover:
        """Where one begins to be faster, and where it may and must be by the bounds."""
        found = self._crossover("time", lambda point: point.time.median)
        if found.cheaper is None:
            return found
        winner, loser = self._curves if found.cheaper == self._labels[0] else self._curves[::-1]
        may = self._onset(lambda value: winner(value).time.low < loser(value).time.high)
        must = self._onset(lambda value: winner(value).time.high < loser(value).time.low)
        return found.model_copy(update={"low": self._place(may), "high": self._place(must, everywhere=True)})

    def _crossover(self, what: Quantity, number: Callable[[Point], float]) -> Crossover:
        first, end = self._places[0], self._places[-1]
        one, other = (number(curve(end)) for curve in self._curves)
        found = Crossover(of=what, between=self._labels, dimension=self._dimension, searched=(first, end))
        if one == other:
            return found
        index = 0 if one < other else 1
        winner, loser = self._curves[index], self._curves[1 - index]
        onset = self._onset(lambda value: number(winner(value)) < number(loser(value)))
        return found.model_copy(update={"cheaper": self._labels[index], "at": self._place(onset)})

    def _onset(self, less: Less) -> int:
        """The index from which on it holds at every place looked at; as many as there are where not at the last."""
        places, holding = self._places, len(self._places)
        for index in sorted({*range(0, len(places), STEPS // 2), len(places) - 1}, reverse=True):
            if not less(places[index]):
                return _first(lambda at: less(places[at]), index + 1, holding)
            holding = index
        return 0

    def _place(self, index: int, *, everywhere: bool = False) -> int | None:
        """The size of an index; None for the first unless that is wanted, and past the last."""
        if index >= len(self._places) or (index == 0 and not everywhere):
            return None
        return self._places[index]


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The first index from ``low`` on of which it holds, as it does of all above; ``high`` for none below that."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low

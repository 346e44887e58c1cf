"""Crossovers on the cost model, by bisection: the size from which one alternative costs less than another."""

import math
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import combinations
from typing import Literal

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.answers import Crossover
from attention_service.core.cancellation import checkpoint
from attention_service.cost import Estimate, executed_flops
from attention_service.cost.rehearsal import Seen
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.operations.complexity.subjects import Subject

STEPS = 64
"""Sizes per octave: neighbours differ by about a hundredth."""
FAR = {"batch": 2**12}
"""Minimum end of the search for each size that does not reach as far as a length."""
LENGTHS = 2**20
TOKENS = frozenset({"length", "batch", "queries", "keys", "past"})
Number = Callable[[int], float]
Less = Callable[[int], bool]


class _Curve:
    """Costs of one subject along a size, each computed lazily and once."""

    def __init__(self, subject: Subject, dimension: str) -> None:
        self.label = subject.label
        self.bound: Callable[[int], BoundRequest] = cache(partial(subject.at, dimension))
        """Return a blank request. Raises InvalidRequest for an impossible size."""
        self.kernel: Callable[[int], str] = cache(lambda size: subject.kernel_of(self.bound(size)))

        def seen(size: int) -> Seen:
            return subject.forward(self.bound(size), self.kernel(size), subject.taps)

        self.time: Callable[[int], Estimate] = cache(
            lambda size: subject.time(seen(size), self.bound(size), self.kernel(size))
        )
        self.peak_bytes: Number = cache(lambda size: seen(size).peak_bytes)
        self.flops: Number = cache(lambda size: executed_flops(self.bound(size), self.kernel(size)))

    def possible(self, size: int) -> bool:
        """True if the size is possible: a spec may limit the number of tokens."""
        try:
            self.bound(size)
        except InvalidRequest:
            return False
        return True


def crossovers(
    subjects: Sequence[Subject], dimension: str, values: Sequence[int], until: float = math.inf
) -> tuple[list[Crossover], bool]:
    """Return the crossovers of each two subjects, for time, peak memory and FLOPs of the forward pass.

    The flag is true if all pairs were searched ``until`` a time of ``time.monotonic``.
    Lengths and batches are searched far beyond ``values``, in steps of a hundredth; widths are searched at ``values``
    alone, since most others are impossible.
    """
    places = lattice(dimension, values)
    reported: list[Crossover] = []
    for one, other in combinations([_Curve(subject, dimension) for subject in subjects], 2):
        if time.monotonic() > until:
            return reported, False
        if possible := _possible(one, other, places):
            pair = _Pair(one, other, dimension, possible)
            reported += [pair.of_time(), pair.of_peak_bytes(), pair.of_flops()]
    return reported, True


def lattice(dimension: str, values: Sequence[int]) -> list[int]:
    """Return the sizes of the comparison, in order."""
    if dimension not in TOKENS:
        return sorted(set(values))
    last = max(*values, FAR.get(dimension, LENGTHS))
    places = {round(2 ** (step / STEPS)) for step in range(STEPS * last.bit_length() + 1)}
    return sorted(place for place in places | {last} if place <= last)


def _possible(one: _Curve, other: _Curve, places: list[int]) -> list[int]:
    """Return the places up to the last size that is possible for both."""

    def ends(index: int) -> bool:
        return not (one.possible(places[index]) and other.possible(places[index]))

    return places[: _first(ends, 0, len(places))]


class _Pair:
    """Two curves along the same sizes."""

    def __init__(self, one: _Curve, other: _Curve, dimension: str, places: list[int]) -> None:
        self._both = one, other
        self._dimension = dimension
        self._places = places

    def of_peak_bytes(self) -> Crossover:
        """Return the size from which one needs less memory."""
        return self._crossover("peak_bytes", [curve.peak_bytes for curve in self._both])

    def of_flops(self) -> Crossover:
        """Return the size from which one takes fewer FLOPs."""
        return self._crossover("flops", [curve.flops for curve in self._both])

    def of_time(self) -> Crossover:
        """Return the size from which one is faster, and the sizes from which it may and must be by the bounds."""
        medians = [lambda size, curve=curve: curve.time(size).median for curve in self._both]
        crossover = self._crossover("time", medians)
        if crossover.cheaper is None:
            return crossover
        winner, loser = self._both if crossover.cheaper == self._both[0].label else self._both[::-1]
        may = self._onset(lambda size: winner.time(size).low < loser.time(size).high)
        must = self._onset(lambda size: winner.time(size).high < loser.time(size).low)
        return crossover.model_copy(update={"low": self._place(may), "high": self._place(must, everywhere=True)})

    def _crossover(self, what: Literal["time", "peak_bytes", "flops"], numbers: Sequence[Number]) -> Crossover:
        first, end = self._places[0], self._places[-1]
        labels = self._both[0].label, self._both[1].label
        crossover = Crossover(of=what, between=labels, dimension=self._dimension, searched=(first, end))
        one, other = (number(end) for number in numbers)
        if one == other:
            return crossover
        index = 0 if one < other else 1
        winner, loser = numbers[index], numbers[1 - index]
        onset = self._onset(lambda size: winner(size) < loser(size))
        return crossover.model_copy(update={"cheaper": labels[index], "at": self._place(onset)})

    def _onset(self, less: Less) -> int:
        """Return the index from which it holds at every place searched; the number of places if not at the last."""
        places, holding = self._places, len(self._places)
        for index in sorted({*range(0, len(places), STEPS // 2), len(places) - 1}, reverse=True):
            if not less(places[index]):
                return _first(lambda at: less(places[at]), index + 1, holding)
            holding = index
        return 0

    def _place(self, index: int, *, everywhere: bool = False) -> int | None:
        """Return the size at an index; None for the first unless ``everywhere``, and past the last."""
        if index >= len(self._places) or (index == 0 and not everywhere):
            return None
        return self._places[index]


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the first index from ``low`` on that holds, if all above it do; ``high`` if none below does."""
    while low < high:
        checkpoint()
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low

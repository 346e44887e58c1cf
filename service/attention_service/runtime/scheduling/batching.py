"""Which of the requests that wait run together: those for which the clock predicts that it is quicker.

What is quicker for some is slower for others. Of the sizes that a batch may have, the one of the greatest power is
taken: the rate at which requests are answered, divided by the mean time until they are (Kleinrock 1979, ICC 79, 43.1).
Large passes gain little by running together and would only wait for one another; tiny ones gain most of their time.

In a crowd, where another comes for each that is answered, nobody gains by going first: whoever is answered sooner is
soon behind the others again, and waits for all of them. There, the batch is taken that answers the most in a second.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median

import numpy as np

from attention_contract.spec import AttentionSpec
from attention_service.cost import Estimate
from attention_service.runtime.binding.bound import Bound, Layout
from attention_service.runtime.operations.operation import Fields
from attention_service.runtime.planning.planner import Plan
from attention_service.runtime.scheduling.joining import Part, Size, run_together, size_of, stacked_bytes

_MANY, _LARGE, _WIDTH, _ROUNDS = 32, 4096, 64, 15
"""To time it: how many small requests are joined, how long the large ones are, how wide all are, and how often."""

Weakness = Callable[[Sequence[float], Sequence[int]], float]
"""How bad it is to run passes one after the other that take so many seconds, and answer so many requests."""


@dataclass(frozen=True)
class Joining:
    """What it takes to put requests together and to take their results apart, beside the pass itself."""

    part_s: float = 0.0
    """For each request."""
    byte_s: float = 0.0
    """For each byte that is copied."""

    def seconds(self, parts: int, copied: int) -> float:
        """Of so many requests, and so many bytes."""
        return parts * self.part_s + copied * self.byte_s

    @classmethod
    def measured(cls) -> "Joining":
        """As it is now, of many small requests and of a few large ones."""
        many, large = _samples(_MANY, 1), _samples(2, _LARGE)
        part_s = _median_seconds(many) / len(many)
        copied = sum(bound.arrays["query"].nbytes for bound in large)
        return cls(part_s, max(_median_seconds(large) - len(large) * part_s, 0.0) / copied)


@dataclass(frozen=True)
class Batch:
    """Requests that run as one."""

    parts: tuple[Part, ...]
    plan: Plan
    """Of all of them at once, with what joining them takes."""

    @property
    def more(self) -> int:
        """Bytes that it needs beyond what its requests are admitted for."""
        return max(self.plan.peak_bytes - sum(part.need for part in self.parts), 0)

    def run(self) -> list[Fields]:
        """The reply's fields of each; it blocks."""
        return run_together([part.bound for part in self.parts], self.parts[0].run)


def choose(waiting: Sequence[Part], joining: Joining, spare: int, *, crowded: bool = False) -> Batch | None:
    """The first of them with some of the others that go with it; None where it does better alone.

    waiting: all that could be run with the first, in the order in which they came. ``spare``: bytes that a batch may
    need beyond what its requests are admitted for. ``crowded``: another comes for each that is answered.
    """
    lengths, weakness = waiting[0].lengths, _elapsed if crowded else _weakness
    alike = [part for part in waiting if part.size.lengths == lengths]
    equal = _equal(alike)
    taken = alike[: _most_powerful(alike, joining, weakness, equal=equal)]
    if len(taken) == len(alike) < len(waiting):
        taken = _with_others(taken, [part for part in waiting if part.lengths != lengths], joining, weakness)
        equal = equal and len(taken) == len(alike)
    while len(taken) > 1:
        plan = _plan(taken, joining, equal=equal)
        if plan.peak_bytes <= sum(part.need for part in taken) + spare:
            return Batch(tuple(taken), plan)
        taken = taken[: len(taken) // 2]
    return None


def _plan(parts: Sequence[Part], joining: Joining, *, equal: bool) -> Plan:
    """The plan of these at once, with what joining them takes."""
    kind, key = parts[0].kind, (parts[0].size, len(parts), parts[0].bytes)
    if equal and key in kind.joined:
        return kind.joined[key]
    size = _size(parts)
    plan, copied = kind.plan(size), stacked_bytes(parts, size)
    seconds = joining.seconds(len(parts), copied)
    predicted = plan.predicted + Estimate(seconds, seconds, seconds)
    plan = replace(plan, predicted=predicted, peak_bytes=plan.peak_bytes + copied)
    if equal:
        kind.joined[key] = plan
    return plan


def _equal(parts: Sequence[Part]) -> bool:
    """Whether all are of one size."""
    size = parts[0].size
    return all(part.size is size or part.size == size for part in parts)


def _most_powerful(alike: Sequence[Part], joining: Joining, weakness: Weakness, *, equal: bool) -> int:
    """How many requests of equal lengths to take at a time: all of them, or a half, a quarter and so on."""
    if not equal:
        return _tried(alike, joining, weakness)
    known, key = alike[0].kind.taken, (alike[0].size, len(alike), alike[0].bytes, weakness is _elapsed)
    if key not in known:
        known[key] = _tried(alike, joining, weakness)
    return known[key]


def _tried(alike: Sequence[Part], joining: Joining, weakness: Weakness) -> int:
    count = size = len(alike)
    best, least = 1, float("inf")
    while size:
        rounds = -(-count // size)
        found = weakness([_seconds(alike[:size], joining)] * rounds, [1] * rounds)
        if found < least:
            best, least = size, found
        size //= 2
    return best


def _with_others(taken: list[Part], others: Sequence[Part], joining: Joining, weakness: Weakness) -> list[Part]:
    """With requests of other lengths too, padded, the nearest first, as long as that has the greater power.

    Lengths are tried 1, 2, 4, … at a time until that is too many, then half as many each time: however many lengths
    wait, few passes are predicted.
    """
    length = sum(taken[0].lengths)
    nearest = sorted(others, key=lambda part: (abs(sum(part.lengths) - length), part.lengths))
    groups = [list(alike) for _, alike in groupby(nearest, key=lambda part: part.lengths)]
    at, step, grows = 0, 1, True
    while step and at < len(groups):
        more = [part for alike in groups[at : at + step] for part in alike]
        if _gains(taken, more, joining, weakness):
            taken, at = taken + more, at + step
        else:
            grows = False
        step = step * 2 if grows else step // 2
    return taken


def _gains(taken: list[Part], more: list[Part], joining: Joining, weakness: Weakness) -> bool:
    """Whether both run better together, padded, than one after the other."""
    together = taken + more
    if not _may_pad(together):
        return False
    apart = weakness([_seconds(taken, joining), _seconds(more, joining)], [len(taken), len(more)])
    return weakness([_seconds(together, joining)], [1]) < apart


def _may_pad(parts: Sequence[Part]) -> bool:
    longest, kind = _size(parts).lengths, parts[0].kind
    return all(kind.may_pad(lengths, longest) for lengths in {part.lengths for part in parts})


def _size(parts: Sequence[Part]) -> Size:
    return size_of([part.bound for part in parts])


def _seconds(parts: Sequence[Part], joining: Joining) -> float:
    size = _size(parts)
    seconds = parts[0].kind.predicted(size).median
    return seconds if len(parts) == 1 else seconds + joining.seconds(len(parts), stacked_bytes(parts, size))


def _weakness(seconds: Sequence[float], counts: Sequence[int]) -> float:
    """The inverse of the power, up to a factor: the time of all passes × the mean time at which requests are answered.

    One pass after the other takes so many seconds, and answers so many requests.
    """
    elapsed = answered = 0.0
    for each, count in zip(seconds, counts, strict=True):
        elapsed += each
        answered += count * elapsed
    return elapsed * answered / sum(counts)


def _elapsed(seconds: Sequence[float], counts: Sequence[int]) -> float:
    """The time of all passes: what each request takes where another comes for each that is answered."""
    del counts
    return sum(seconds)


def _samples(count: int, length: int) -> list[Bound]:
    """Requests that are nothing but a query."""
    query = np.zeros((1, 1, length, _WIDTH), np.float32)
    sample = Bound(
        None, AttentionSpec(), Layout(), 1, 1, 1, length, length, 0, _WIDTH, _WIDTH, "float32", "float32",
        {"query": query}, "query",
    )  # fmt: skip
    return [sample] * count


def _median_seconds(bounds: Sequence[Bound]) -> float:
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        run_together(bounds, lambda whole: {"output": whole.arrays["query"]})
        times.append(time.perf_counter() - started)
    return median(times)

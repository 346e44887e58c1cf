"""Largest requests in the free memory, by the estimate that admits them."""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf, log, sqrt
from typing import Literal

from attention_contract.errors import InvalidRequest, KernelUnsuitable
from attention_contract.schemas.answers import CostLimits, Fits, Largest
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.operations.complexity.subjects import LARGEST_SIZE, Passes, Subject
from attention_service.runtime.operations.complexity.valid_sizes import value_of
from attention_service.runtime.planning.kernel_choice import able_kernels

Bound = Literal["memory", "spec", "shape"]


def limits(subject: Subject) -> CostLimits:
    """Return the longest sequence and the largest batch, for a forward pass and for gradients."""
    try:
        gradients = _fits(subject, "gradients")
    except KernelUnsuitable:
        gradients = None
    return CostLimits(free_bytes=subject.place.free, forward=_fits(subject, "forward"), gradients=gradients)


def _fits(subject: Subject, computation: Passes) -> Fits:
    return Fits(longest=_largest(subject, "length", computation), largest_batch=_largest(subject, "batch", computation))


def _largest(subject: Subject, dimension: str, computation: Passes) -> Largest:
    """Search the largest size: the bytes of a request grow with its size, whichever kernel it takes."""
    free, size = subject.place.free, 0

    def possible(size: int) -> BoundRequest | None:
        try:
            return subject.at(dimension, size)
        except InvalidRequest:
            return None

    def bare(size: int, kernel: str) -> float:
        """Peak of a kernel without taps."""
        bound = possible(size)
        return inf if bound is None else subject.peak_bytes(bound, kernel, computation, far=subject.place.free)

    def planned(size: int) -> float:
        bound = possible(size)
        return inf if bound is None else need(subject, bound, computation)[1]

    start = value_of(subject.base, dimension)
    for kernel in able_kernels(subject.base, subject.place.device, subject.kernel):
        size = largest_within(partial(bare, kernel=kernel), free, start, LARGEST_SIZE, least=size)
    if planned(size) > free:  # what is returned takes more than that
        size = largest_within(planned, free, size, size)
    if not size:
        return Largest(size=0, bound="memory" if possible(1) else "spec")
    kernel, peak = need(subject, subject.at(dimension, size), computation)
    limited: Bound = "shape" if size == LARGEST_SIZE else "memory" if possible(size + 1) else "spec"
    return Largest(size=size, kernel=kernel, peak_bytes=peak, bound=limited)


def need(subject: Subject, bound: BoundRequest, computation: Passes) -> tuple[str, int]:
    """Return the planner's kernel, and the bytes for which the request would be admitted."""
    kernel = subject.kernel_of(bound, computation, capacity=subject.place.free)
    return kernel, subject.peak_bytes(bound, kernel, computation, subject.taps, far=subject.place.free)


_FLAT = 0.1
"""Exponent of growth in the size below which extrapolation is pointless."""


def largest_within(needs: Callable[[int], float], limit: float, start: int, most: int, *, least: int = 0) -> int:
    """Return the largest size up to ``most`` whose need, which grows with it, is within the limit; else ``least``.

    An estimate may be slow, and grows nearly as a polynomial of second degree: ``likely`` extrapolates from the sizes
    tried, beginning with ``start``. If that does not halve the rest of the range twice in a row, or double the size
    while the end of the range is unknown, bisection or doubling does.
    """
    low, high, idle, ends = least, most + 1, 0, False
    seen: list[tuple[int, float]] = []
    guess = min(least + 1 if least else max(start, 1), most)
    while high - low > 1:
        before, doubled, needed = high - low, 2 * low, needs(guess)
        low, high = (guess, high) if needed <= limit else (low, guess)
        if 0 < needed < inf:
            seen.append((guess, needed))
        idle = 0 if 2 * (high - low) <= before or (high > most and low >= doubled) else idle + 1
        ends = ends if needed <= limit else needed == inf
        size = likely(seen[-3:], limit) if idle < 2 else None
        if ends and size is not None and size >= high:  # beyond what can be
            size = None
        if size is None:
            size, idle = (low + high) // 2 if high <= most else 2 * low, 0
        guess = min(max(int(min(size, most)), low + 1), high - 1)
    return low


def likely(seen: Sequence[tuple[int, float]], limit: float) -> float | None:
    """Return the size that needs ``limit``, by up to three sizes and their needs; None if they are inconclusive.

    It lies on the parabola through three points, the power law through two, or a power of 1.5 through one.
    """
    if not seen:
        return None
    if len(seen) < 3:
        (size, needed), power = seen[-1], 1.5
        if len(seen) == 2:
            power = log(needed / seen[0][1]) / log(size / seen[0][0])
        return size * (limit / needed) ** (1 / power) if power > _FLAT and limit > 0 else None
    (one, at_one), (two, at_two), (three, at_three) = seen
    rise = (at_two - at_one) / (two - one)
    bend = ((at_three - at_two) / (three - two) - rise) / (three - one)
    slope, short = rise - bend * (one + two), limit - at_one + rise * one - bend * one * two
    inside = slope**2 + 4 * bend * short
    below = slope + sqrt(inside) if inside >= 0 else 0
    return 2 * short / below if below > 0 else None


def last_that(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to ``most`` that holds, if all below it do; 0 for none."""
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low

"""How far requests can grow in the memory that is free, by the estimate that admits them."""

from collections.abc import Callable
from math import inf
from typing import Literal

from attention_contract.errors import InvalidRequest, KernelUnsuitable
from attention_contract.schemas.answers import CostLimits, Fits, Largest
from attention_service.core import cost
from attention_service.core.cost import Workload
from attention_service.runtime.complexity.subjects import GRADIENTS, LARGEST_SIZE, Subject
from attention_service.runtime.planning import FORWARD, Purpose, able_kernels, bare_peak, choose_kernel

Bound = Literal["memory", "spec", "shape"]


def limits(subject: Subject) -> CostLimits:
    """The longest sequence and the largest batch, of a forward pass and of gradients."""
    try:
        gradients = _fits(subject, GRADIENTS)
    except KernelUnsuitable:
        gradients = None
    return CostLimits(free_bytes=subject.place.free, forward=_fits(subject, FORWARD), gradients=gradients)


def _fits(subject: Subject, purpose: Purpose) -> Fits:
    return Fits(longest=_largest(subject, "length", purpose), largest_batch=_largest(subject, "batch", purpose))


def _largest(subject: Subject, dimension: str, purpose: Purpose) -> Largest:
    """Found by bisection: what a request needs grows with its size, whichever kernel it takes."""
    able = able_kernels(subject.base, subject.dtype, subject.place.device, subject.kernel, purpose)
    free = subject.place.free

    def possible(size: int) -> Workload | None:
        try:
            return subject.at(dimension, size)
        except InvalidRequest:
            return None

    def least(size: int) -> float:
        """What the kernel that needs least does, whatever is returned; quick, since no time is predicted."""
        work = possible(size)
        if work is None:
            return inf
        bare = cost.plainly(work)
        return min(bare_peak(bare, kernel, purpose, free) for kernel in able)

    def planned(size: int) -> float:
        work = possible(size)
        return inf if work is None else need(subject, work, purpose)[1]

    size = largest_within(least, free, subject.base.value(dimension), LARGEST_SIZE)
    if planned(size) > free:  # what is returned takes more than that
        size = largest_within(planned, free, size, size)
    if not size:
        return Largest(size=0, bound="memory" if possible(1) else "spec")
    kernel, peak = need(subject, subject.at(dimension, size), purpose)
    bound: Bound = "shape" if size == LARGEST_SIZE else "memory" if possible(size + 1) else "spec"
    return Largest(size=size, kernel=kernel, peak_bytes=peak, bound=bound)


def need(subject: Subject, work: Workload, purpose: Purpose) -> tuple[str, int]:
    """The kernel that the planner would take, and the bytes for which the request would be admitted."""
    place = subject.place
    kernel = choose_kernel(work, subject.dtype, place.device, subject.kernel, place.free, purpose)
    if purpose.gradient:
        return kernel, cost.gradient_peak_bytes(cost.plainly(work), kernel, room=place.free)
    return kernel, cost.peak_bytes(work, kernel)


def largest_within(needs: Callable[[int], float], limit: float, start: int, most: int) -> int:
    """The largest size up to ``most`` whose need, which grows with it, is within the limit; 0 for none.

    By false position from ``start``: an estimate may be slow, and what is needed is nearly a power of the size. Where
    that does not halve what is left of the range, by bisection.
    """
    low, high, least, greatest = 0, most + 1, 0.0, inf
    guess = min(max(start, 1), most)
    while high - low > 1:
        before = high - low
        for size in (guess, guess + 1):  # two neighbours may end the search
            if low < size < high:
                needed = needs(size)
                if needed <= limit:
                    low, least = size, needed
                else:
                    high, greatest = size, needed
                    break
        if greatest < inf and 2 * (high - low) <= before:
            guess = low + int((high - low) * (limit - least) / (greatest - least))
        elif high > most and least:
            guess = min(int(low * max(limit / least, 2)), most)
        else:
            guess = (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
    return low


def last(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` of which something holds that holds of all below; 0 for none."""
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low

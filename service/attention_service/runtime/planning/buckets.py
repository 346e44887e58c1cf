"""Plans by bucket: one rehearsal and two predictions serve every request whose sizes lie in the bucket."""

from collections.abc import Callable, Hashable
from typing import Final, Generic, Protocol, Self, TypeVar

from attention_service.cost import Clock, Estimate
from attention_service.runtime.device.plan_cache import PlanCache
from attention_service.runtime.planning.kernel_choice import Cost
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.planning.request_sizes import COARSE, FINE

SMALL: Final = 2**25
"""Bytes. A coarse bucket may be admitted for twice a request's need, which is little up to this size."""
ANY_ROOM: Final = 2**62
"""Bytes, for plans that do not depend on memory."""
_MOST = 64
"""Exact sizes that one bucket caches."""


class Rounded(Protocol, Hashable):
    """Sizes that have buckets."""

    def upper(self, steps: int) -> Self:
        """The upper end of the bucket, of which there are ``2**steps`` an octave."""

    def lower(self, steps: int) -> Self:
        """The lower end of the bucket."""

    def growth(self, low: Self) -> float:
        """Return the factor by which a kernel's tiles may grow from these smaller sizes."""


SizesT = TypeVar("SizesT", bound=Rounded)
SizesT_contra = TypeVar("SizesT_contra", bound=Rounded, contravariant=True)


class Costs(Protocol[SizesT_contra]):
    """The costs of requests that differ in their sizes alone, each for exact sizes."""

    @property
    def flops(self) -> Callable[[SizesT_contra, str], int]:
        """FLOPs of a computation by a kernel. A bucket keeps this function and nothing else."""

    @property
    def off_loop(self) -> bool:
        """True if sizes do not determine the time."""

    def kernel(self, sizes: SizesT_contra, room: int) -> str:
        """Return the fastest kernel within ``room`` bytes, or if there is none the one that needs the least."""

    def cost(self, sizes: SizesT_contra, kernel: str, room: int) -> Cost:
        """Peak memory and time; of memory a lower bound if that is far above ``room`` bytes."""


class Bucket(Generic[SizesT]):
    """The plans of all sizes between a lower and an upper end.

    The kernel is that of the upper end. FLOPs are exact, and the time is interpolated by them.
    """

    def __init__(self, costs: Costs[SizesT], low: SizesT, high: SizesT, room: int) -> None:
        self.kernel = costs.kernel(high, room)
        self._flops, self._plans, self._off_loop = costs.flops, dict[SizesT, Plan](), costs.off_loop
        peak, time, self._result_bytes = costs.cost(high, self.kernel, room)
        self._ends = [(self._flops(high, self.kernel), time)] * 2
        self.peak_bytes = peak
        """The bound on the memory of every request in the bucket.

        A kernel that takes fewer sequences or queries at a time as they get longer may need less at the upper end than
        before; until then its memory grows no faster than the sizes.
        """
        if low != high and peak <= room:
            less, sooner, _ = costs.cost(low, self.kernel, room)
            self._ends[0] = self._flops(low, self.kernel), sooner
            self.peak_bytes = max(peak, round(less * high.growth(low)))

    def plan(self, sizes: SizesT) -> Plan:
        """The plan of exact sizes within the bucket."""
        plan = self._plans.get(sizes)
        if plan is None:
            flops = self._flops(sizes, self.kernel)
            plan = Plan(self.kernel, flops, self.peak_bytes, self._time(flops), self._off_loop, self._result_bytes)
            if len(self._plans) >= _MOST:
                self._plans.clear()
            self._plans[sizes] = plan
        return plan

    def _time(self, flops: int) -> Estimate:
        (least, low), (most, high) = self._ends
        if most == least:
            return high
        share = min(max((flops - least) / (most - least), 0.0), 1.0)
        return Estimate(
            low.median + share * (high.median - low.median),
            low.low + share * (high.low - low.low),
            low.high + share * (high.high - low.high),
        )


def plan_by_bucket(
    cache: PlanCache, clock: Clock, family: Hashable, sizes: SizesT, room: int, costs: Callable[[], Costs[SizesT]]
) -> Plan:
    """Return the plan of a request from the plan of its bucket, which is cached.

    family: equal for requests that differ in their sizes alone; room: bytes that the request may need at most. A
    request that may not fit, or that a coarse bucket bounds loosely, goes on to a finer bucket, then to its exact
    sizes: no request is refused for the size of its bucket.
    """
    # A bucket is planned for the next power of two, and holds for every room below that holds its peak.
    ceiling = 1 << room.bit_length()
    for steps, most in ((COARSE, min(SMALL, room)), (FINE, room)) if cache.by_bucket else ():
        bucket = _bucket(cache, clock, family, sizes, steps, ceiling, costs)
        if bucket.peak_bytes <= most:
            return bucket.plan(sizes)
        if bucket.peak_bytes > room:
            break
    exact: Bucket[SizesT] = cache.get(clock, (family, sizes, None, room), lambda: Bucket(costs(), sizes, sizes, room))
    return exact.plan(sizes)


def _bucket(
    cache: PlanCache,
    clock: Clock,
    family: Hashable,
    sizes: SizesT,
    steps: int,
    ceiling: int,
    costs: Callable[[], Costs[SizesT]],
) -> Bucket[SizesT]:
    high = sizes.upper(steps)
    return cache.get(clock, (family, high, steps, ceiling), lambda: Bucket(costs(), sizes.lower(steps), high, ceiling))

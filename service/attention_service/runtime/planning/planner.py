"""From a bound request to a plan: which kernel, at what cost. Nothing is allocated here.

A plan is the operation launched on a blank request: what it holds and does there, it will hold and do. One rehearsal at
each end of a bucket of sizes serves every request in it.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from attention_contract.schemas.attention import Edit
from attention_contract.schemas.costs import accuracy
from attention_service import cost
from attention_service.core.kernels import Needs
from attention_service.core.masks.operation_count import CHEAP, mask_cost
from attention_service.core.masks.visibility import EVERYTHING
from attention_service.core.problem import Selection
from attention_service.cost import Estimate
from attention_service.cost.rehearsal import Seen
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.planning.blank_requests import at_sizes, blanked, global_positions, sizes_of
from attention_service.runtime.planning.kernel_choice import PLAIN, OperationCost, able_kernels, choose_kernel, cost_of
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.planning.rehearsals import Operate, seen
from attention_service.runtime.planning.request_sizes import COARSE, FINE, RequestSizes

SMALL: Final = 2**25
"""Bytes. A coarse bucket may be admitted for twice a request's need, which is little up to this size."""
_UNLIMITED: Final = 2**62
"""Bytes, for plans that do not depend on memory."""
_MAX_EXACT_PLANS: Final = 64
"""Exact sizes that one bucket caches."""


class PlanKey(NamedTuple):
    """Everything in a request that determines its plan, beside its tensors."""

    computation: accuracy.Computation = "forward"
    kernel: str | None = None
    """The kernel that the request forces."""
    needs: Needs = PLAIN
    asks: Hashable = ()
    """The rest of the request, as far as its cost depends on it."""
    has_sizes: bool = False
    """True if the request names queries or keys, so that no bucket of sizes takes it."""
    whole: bool = False
    """True if no part of the rehearsal stands for others."""
    pairs: bool = False
    """True if a method that approximates makes a matrix of weights: it is rehearsed as a whole too."""


@dataclass(frozen=True)
class Rehearsed:
    """The operation of a request, as the planner launches and counts it on blank requests."""

    operate: Operate
    flops: Callable[[BoundRequest, str], int] = cost.executed_flops
    """FLOPs of a blank request by a kernel."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Factors on the operations of a rehearsal, by the name of their phase."""
    plain: Operate | None = None
    """The same returning the output alone: which taps are asked for must not change which kernel computes it. Default:
    the same."""


def plan_request(bound: BoundRequest, question: PlanKey, device: Device, capacity: int, rehearsed: Rehearsed) -> Plan:
    """The plan of a bound request.

    capacity: bytes that it may need at most, which bear on the kernel. Raises KernelUnsuitable where the kernel that
    the request forces cannot compute it, or none can.
    """
    sizes, family = sizes_of(bound), family_of(bound, question, device)

    def costs() -> RequestCosts:
        return RequestCosts.of(bound, question, device, rehearsed)

    if not question.has_sizes:
        return _plan_by_bucket(device, family, sizes, capacity, costs)
    key = family, sizes, capacity.bit_length()
    exact: PlanBucket = device.plans.get(device.clock, key, lambda: PlanBucket(costs(), sizes, sizes, capacity))
    return exact.plan(sizes)


def plan_pass(bound: BoundRequest, question: PlanKey, device: Device, batch: int, rehearsed: Rehearsed) -> Plan:
    """The plan of a pass of ``batch`` sequences that joins several requests like this one."""
    sizes = sizes_of(bound)._replace(batch=batch, mask=())

    def costs() -> RequestCosts:
        return RequestCosts.of(bound, question, device, rehearsed)

    family = family_of(bound, question, device), "joined"
    return _plan_by_bucket(device, family, sizes, _UNLIMITED, costs)


@dataclass(frozen=True)
class RequestCosts:
    """The costs of requests that differ in their sizes alone."""

    blank: BoundRequest
    """One of them."""
    question: PlanKey
    device: Device
    rehearsed: Rehearsed
    flops: Callable[[RequestSizes, str], int]
    _costs: dict[Hashable, OperationCost] = field(default_factory=dict)

    @classmethod
    def of(cls, bound: BoundRequest, question: PlanKey, device: Device, rehearsed: Rehearsed) -> "RequestCosts":
        """The costs of requests like this one."""
        blank = blanked(bound, device.threads)
        return cls(blank, question, device, rehearsed, partial(_flops, rehearsed.flops, blank))

    @property
    def off_loop(self) -> bool:
        """True for masks of so many small operations that sizes do not determine the time."""
        return mask_cost(self.blank.spec.masks) > CHEAP

    def kernel(self, sizes: RequestSizes, capacity: int) -> str:
        """Return the fastest kernel within ``capacity`` bytes, or if there is none the one that needs the least."""
        able = able_kernels(self.blank, self.device, self.question.kernel, self.question.needs)

        def peak(kernel: str) -> int:
            return self._cost(sizes, kernel, capacity, self.rehearsed.plain or self.rehearsed.operate).peak_bytes

        backward = self.question.computation == "gradients"
        return choose_kernel(at_sizes(self.blank, sizes), able, self.device.clock, capacity, peak, backward=backward)

    def cost(self, sizes: RequestSizes, kernel: str, capacity: int) -> OperationCost:
        """Peak memory and time; of memory a lower bound if that is far above ``capacity`` bytes."""
        return self._cost(sizes, kernel, capacity, self.rehearsed.operate)

    def _cost(self, sizes: RequestSizes, kernel: str, capacity: int, operate: Operate) -> OperationCost:
        key, question = (sizes, kernel, operate), self.question

        def run(bound: BoundRequest, kernel: str) -> Seen:
            rehearsal = seen(
                bound, kernel, operate, twice=question.needs.double_backward, whole=question.whole or question.pairs
            )
            return rehearsal.scaled(self.rehearsed.times)

        if key not in self._costs:
            bound = at_sizes(self.blank, sizes)
            pairs = question.pairs and operate is self.rehearsed.operate
            self._costs[key] = cost_of(bound, kernel, self.device, capacity, question.computation, run, pairs=pairs)
        return self._costs[key]


class PlanBucket:
    """The plans of all sizes between a lower and an upper end.

    The kernel is that of the upper end. FLOPs are exact, and the time is interpolated by them.
    """

    def __init__(self, costs: RequestCosts, low: RequestSizes, high: RequestSizes, capacity: int) -> None:
        self.kernel = costs.kernel(high, capacity)
        self._flops, self._plans, self._off_loop = costs.flops, dict[RequestSizes, Plan](), costs.off_loop
        peak, time, self._result_bytes = costs.cost(high, self.kernel, capacity)
        self._ends = [(self._flops(high, self.kernel), time)] * 2
        self.peak_bytes = peak
        """The bound on the memory of every request in the bucket.

        A kernel that takes fewer sequences or queries at a time as they get longer may need less at the upper end than
        before; until then its memory grows no faster than the sizes.
        """
        if low != high and peak <= capacity:
            less, sooner, _ = costs.cost(low, self.kernel, capacity)
            self._ends[0] = self._flops(low, self.kernel), sooner
            self.peak_bytes = max(peak, round(less * high.growth(low)))

    def plan(self, sizes: RequestSizes) -> Plan:
        """The plan of exact sizes within the bucket."""
        plan = self._plans.get(sizes)
        if plan is None:
            flops = self._flops(sizes, self.kernel)
            plan = Plan(self.kernel, flops, self.peak_bytes, self._time(flops), self._off_loop, self._result_bytes)
            if len(self._plans) >= _MAX_EXACT_PLANS:
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


def _plan_by_bucket(
    device: Device, family: Hashable, sizes: RequestSizes, capacity: int, costs: Callable[[], RequestCosts]
) -> Plan:
    """Return the plan of a request from the plan of its bucket, which is cached.

    family: equal for requests that differ in their sizes alone; capacity: bytes that the request may need at most. A
    request that may not fit, or that a coarse bucket bounds loosely, goes on to a finer bucket, then to its exact
    sizes: no request is refused for the size of its bucket.
    """
    cache, clock = device.plans, device.clock

    def planned(low: RequestSizes, high: RequestSizes, capacity: int, steps: int | None) -> PlanBucket:
        return cache.get(clock, (family, high, steps, capacity), lambda: PlanBucket(costs(), low, high, capacity))

    # A bucket is planned for the next power of two, and holds for every capacity below that holds its peak.
    ceiling = 1 << capacity.bit_length()
    for steps, most in ((COARSE, min(SMALL, capacity)), (FINE, capacity)) if cache.by_bucket else ():
        bucket = planned(sizes.lower(steps), sizes.upper(steps), ceiling, steps)
        if bucket.peak_bytes <= most:
            return bucket.plan(sizes)
        if bucket.peak_bytes > capacity:
            break
    return planned(sizes, sizes, capacity, None).plan(sizes)


def _flops(count: Callable[[BoundRequest, str], int], blank: BoundRequest, sizes: RequestSizes, kernel: str) -> int:
    return count(at_sizes(blank, sizes), kernel)


def family_of(bound: BoundRequest, question: PlanKey, device: Device) -> Hashable:
    """Equal for requests that differ in their sizes and numbers alone."""
    module, arrays = bound.module, bound.arrays
    return (
        (bound.spec.model_dump_json(), bound.heads, bound.kv_heads, bound.head_dim, bound.value_dim, bound.own_key_dim)
        if module is None
        else module.config_json,
        bound.layout,
        bound.dtype,
        bound.reply_dtype,
        bound.state_wanted,
        bound.dropped,
        bound.bool_mask,
        bound.fine_gate,
        question,
        device.threads,
        None if bound.sequence_masks is None else tuple(global_positions(bound)),
        tuple(bound.learned) if module is not None else (),
        *arrays,
    )


def edit_sizes(edits: Sequence[Edit]) -> Hashable:
    """The facts about edits that bear on their cost."""
    return tuple(
        (edit.tap, edit.renormalize, _action(edit), edit.tensor is not None and edit.tensor.shape, *_counts(edit))
        for edit in edits
    )


def _action(edit: Edit) -> str:
    """The action of an edit, where it bears on the cost."""
    return "scale" if edit.scale is not None else "put" if edit.add is None else "add"


def _counts(named: Edit | Selection) -> Iterator[int | None]:
    """Yield how many heads and queries, and of an edit keys, are named; None for all."""
    axes = (named.heads, named.queries, named.keys if isinstance(named, Edit) else None)
    yield from (None if axis is None else len(axis) for axis in axes)


def selection_sizes(selection: Selection) -> Hashable:
    """The facts about a selection that bear on its cost."""
    return tuple(_counts(selection))


def names_tokens(edits: Sequence[Edit], selection: Selection = EVERYTHING) -> bool:
    """True if edits or a selection name queries or keys, or bring tensors."""
    return selection.queries is not None or any(
        edit.queries is not None or edit.keys is not None or edit.tensor is not None for edit in edits
    )

"""From a bound request to a plan: which kernel, at what cost. Nothing is allocated here."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from attention_contract.schemas.attention import Edit
from attention_contract.spec import AttentionSpec
from attention_contract.tensors import Array
from attention_service import cost
from attention_service.core.kernels.fused.cpu_blocks import CUT
from attention_service.core.masks.global_tokens import with_global_tokens
from attention_service.core.masks.operation_count import CHEAP, mask_cost
from attention_service.core.positions.token_positions import MAX_POSITION
from attention_service.core.problem import Selection
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.cost import Clock, Estimate, Workload
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.binding.recurrence_binding import NAMES
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.planning.buckets import ANY_ROOM, plan_by_bucket
from attention_service.runtime.planning.kernel_choice import FORWARD, Computation, choose_kernel
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.planning.request_sizes import COARSE, RequestSizes, bucket_upper

_EVERYTHING = Selection()
_CARRIED = frozenset(NAMES)


class PlanKey(NamedTuple):
    """Everything in a request that determines its plan, beside its tensors."""

    purpose: Computation = FORWARD
    kernel: str | None = None
    """The kernel that the request forces."""
    taps: frozenset[str] = frozenset({"output"})
    averaged: bool = False
    reported: bool = False
    compared: bool = False
    returns_dropout_mask: bool = False
    edits: tuple[tuple[str, str], ...] = ()
    """Tap and action of each edit, in the form of ``Workload.edits``."""
    wrt: frozenset[str] = frozenset({"inputs", "parameters"})


def plan_request(
    bound: BoundRequest,
    question: PlanKey,
    device: Device,
    room: int,
    select: Selection = _EVERYTHING,
    edits: Sequence[Edit] = (),
) -> Plan:
    """The plan of a bound request.

    room: bytes that it may need at most, which bear on the kernel. Raises KernelUnsuitable where the kernel that the
    request forces cannot compute it, or none can.
    """
    sizes = _sizes(bound, select, edits)

    brought = _brought_bytes(bound)

    def costs() -> RequestCosts:
        return RequestCosts(_workload(bound, question, sizes, device.threads), question, bound.dtype, device, brought)

    family = family_of(bound, question, device), brought
    return plan_by_bucket(device.plans, device.clock, family, sizes, room, costs)


@dataclass(frozen=True)
class RequestCosts:
    """The costs of requests that differ in their sizes alone."""

    work: Workload
    """Workload of one of them."""
    question: PlanKey
    dtype: str
    device: Device
    brought_bytes: int = 0
    """Bytes of the parameters that the request brings to a module."""

    @property
    def slow_masks(self) -> bool:
        """True for masks of so many small operations that sizes do not determine the time."""
        return mask_cost(self.work.spec.masks) > CHEAP

    def kernel(self, sizes: RequestSizes, room: int) -> str:
        """Return the fastest kernel within ``room`` bytes, or if there is none the one that needs the least."""
        work = sizes.of(self.work)
        return choose_kernel(work, self.dtype, self.device, self.question.kernel, room, self.question.purpose)

    def peak_bytes(self, sizes: RequestSizes, kernel: str, room: int) -> int:
        """Peak memory; a lower bound if that is far above ``room`` bytes."""
        work, purpose = sizes.of(self.work), self.question.purpose
        # The mask of the kept weights is made in blocks and put together.
        dropout_mask = 2 * cost.tap_elements(work, "weights") if self.question.returns_dropout_mask else 0
        return self.brought_bytes + dropout_mask + _peak_bytes(work, kernel, purpose, room)

    def flops(self, sizes: RequestSizes, kernel: str) -> int:
        """FLOPs of the computation."""
        return _flops(sizes.of(self.work), kernel, self.question.purpose)

    def predicted(self, sizes: RequestSizes, kernel: str) -> Estimate:
        """The time of the computation."""
        return _predicted(sizes.of(self.work), kernel, self.question.purpose, self.device.clock)


def plan_pass(
    bound: BoundRequest, question: PlanKey, select: Selection, kernel: str, device: Device, batch: int
) -> Plan:
    """The plan of a pass of ``batch`` sequences that joins several requests like this one, by one kernel."""
    question, one = question._replace(kernel=kernel), _sizes(bound, select, ())
    sizes = one._replace(batch=batch, mask=())

    def costs() -> RequestCosts:
        return RequestCosts(_workload(bound, question, one, device.threads), question, bound.dtype, device)

    return plan_by_bucket(
        device.plans, device.clock, (family_of(bound, question, device), "joined"), sizes, ANY_ROOM, costs
    )


def workload(bound: BoundRequest, question: PlanKey, select: Selection, device: Device) -> Workload:
    """Return the workload of a bound request without its edits."""
    return _workload(bound, question, _sizes(bound, select, ()), device.threads)


def _workload(bound: BoundRequest, question: PlanKey, sizes: RequestSizes, threads: int) -> Workload:
    arrays = bound.arrays
    mask, gate = arrays.get("mask"), arrays.get("gate")
    return Workload(
        batch=sizes.batch,
        queries=sizes.queries,
        keys=bound.keys,
        own_key_dim=bound.own_key_dim,
        past=sizes.past,
        heads=bound.heads,
        kv_heads=bound.kv_heads,
        head_dim=bound.head_dim,
        value_dim=bound.value_dim,
        itemsize=TORCH_DTYPES[bound.dtype].itemsize,
        half=bound.dtype == "float16",
        reply=bound.reply_dtype,
        spec=_planned_spec(bound),
        sizes=bound.module.sizes if bound.module is not None else None,
        taps=question.taps,
        selected_heads=sizes.selected_heads,
        selected_queries=sizes.selected_queries,
        request_mask_elements=0 if mask is None else mask.size,
        bool_mask=mask is not None and mask.dtype.kind == "b",
        padded="key_mask" in arrays or "key_lengths" in arrays,
        real_keys=sizes.real_keys,
        batched_offsets="offsets" in arrays or _differ(bound),
        offsets=sizes.offsets,
        batched_places="offsets" in arrays or "positions" in arrays,
        edits=question.edits,
        edit_elements=sizes.edit_elements,
        dropped=bound.dropout is not None,
        sent=frozenset((_CARRIED & arrays.keys()) | ({"return_state"} if bound.state_wanted else set())),
        fine_gate=gate is not None and gate.ndim == 4,
        reported=question.reported,
        compared=question.compared,
        averaged=question.averaged,
        inputs=frozenset({"query", "key", "value"} & arrays.keys()),
        wrt=question.wrt,
        threads=threads,
    )


def edit_actions(edits: Sequence[Edit]) -> tuple[tuple[str, str], ...]:
    """Return the tap of each edit and its action, in the form of ``Workload.edits``."""
    return tuple((edit.tap, _action(edit)) for edit in edits) if edits else ()


def _action(edit: Edit) -> str:
    if edit.renormalize:
        return "renormalize"
    return "value" if edit.value is not None else "scale" if edit.scale is not None else "set"


def family_of(bound: BoundRequest, question: PlanKey, device: Device) -> Hashable:
    """Equal for requests that differ in their sizes and numbers alone."""
    module, arrays = bound.module, bound.arrays
    mask, gate = arrays.get("mask"), arrays.get("gate")
    return (
        (bound.spec.model_dump_json(), bound.heads, bound.kv_heads, bound.head_dim, bound.value_dim, bound.own_key_dim)
        if module is None
        else module.config_json,
        bound.dtype,
        bound.reply_dtype,
        bound.state_wanted,
        bound.dropout is not None,
        mask is not None and mask.dtype.kind == "b",
        gate is not None and gate.ndim == 4,
        question,
        device.threads,
        None if bound.sequence_masks is None else tuple(_global_positions(bound)),
        *arrays,
    )


def _planned_spec(bound: BoundRequest) -> AttentionSpec:
    """Return the spec that costs are counted for.

    If sequences have global tokens of their own, that is a spec with as many as any sequence has, spread over the keys:
    which tokens they are bears little on the cost, so requests that differ in them alone share a plan.
    """
    if bound.sequence_masks is None:
        return bound.spec
    masks = with_global_tokens(bound.spec.masks, _global_positions(bound))
    return bound.spec.model_copy(update={"masks": masks})


def _differ(bound: BoundRequest) -> bool:
    """True if sequences have different masks."""
    return bound.sequence_masks is not None and len(bound.sequence_masks) > 1


def _global_positions(bound: BoundRequest) -> list[int]:
    """Positions below the largest power of two within the keys, about as many as a sequence has global tokens."""
    count = int(bound.arrays["global_mask"].sum(1).max(initial=0))
    keys = 1 << (max(bound.keys - bound.added_keys, 1).bit_length() - 1)
    count = min(bucket_upper(count, COARSE), keys) if count else 0
    return [index * keys // count for index in range(count)]


def _brought_bytes(bound: BoundRequest) -> int:
    """Bytes on the device of the parameters that a request brings to a module."""
    if bound.module is None:
        return 0
    return TORCH_DTYPES[bound.dtype].itemsize * sum(x.size for x in bound.learned.values())


_PLAIN = frozenset({"query", "key", "value", "past_key", "past_value"})


def _sizes(bound: BoundRequest, select: Selection, edits: Sequence[Edit]) -> RequestSizes:
    arrays = bound.arrays
    batch, queries, new_keys, past = bound.batch, bound.queries, bound.new_keys, bound.past
    if arrays.keys() <= _PLAIN and not edits and select == _EVERYTHING:
        return RequestSizes(batch, queries, new_keys, past)
    mask, offsets = arrays.get("mask"), arrays.get("offsets")
    return RequestSizes(
        batch,
        queries,
        new_keys,
        past,
        () if mask is None else (1,) * (4 - mask.ndim) + mask.shape,
        _real_keys(bound),
        (past,) * batch * _differ(bound) if offsets is None else _clamped(offsets),
        None if select.heads is None else len(select.heads),
        None if select.queries is None else len(select.queries),
        sum(0 if edit.value is None else edit.value.size for edit in edits),
    )


def _clamped(offsets: Array) -> tuple[int, ...]:
    """Return the offsets of the sequences as the computation clamps them; a bucket of larger ones would leave int64."""
    return tuple(max(-MAX_POSITION, min(offset, MAX_POSITION)) for offset in offsets.tolist())


def _real_keys(bound: BoundRequest) -> int:
    """Keys up to the last that is real in any sequence, in whole cells of the blocked kernel; 0 for no padding."""
    lengths, mask = (bound.arrays.get(name) for name in ("key_lengths", "key_mask"))
    if (lengths is None and mask is None) or not bound.batch:
        return 0
    last = 2**62 if lengths is None else int(lengths.max())
    if mask is not None:
        real = np.flatnonzero(mask.any(0))
        last = min(last, int(real[-1]) + 1 if len(real) else 0)
    return -(-max(last, 1) // CUT.cell) * CUT.cell


def _flops(work: Workload, kernel: str, purpose: Computation) -> int:
    if purpose.attributed is not None:
        return cost.attribution_flops(work, *purpose.attributed)
    forward = cost.executed_flops(work, kernel)
    if purpose.gradient:
        backward = cost.executed_backward_flops(work, kernel)
        if purpose.half is not None:
            return forward if purpose.half == "forward" else backward
        return forward + backward * (1 + cost.SECOND_PASSES * purpose.double_backward)
    if work.compared:  # once more, from the same queries, keys and values
        once = cost.flops(work, masked=False)
        forward += forward - once.projections - once.position
    return forward + (cost.flops(cost.exactly(work), masked=False).total if work.reported else 0)


def _peak_bytes(work: Workload, kernel: str, purpose: Computation, room: int) -> int:
    match purpose.operation:
        case "gradients":
            twice, checked = purpose.double_backward, purpose.checks > 0
            return cost.gradient_peak_bytes(work, kernel, purpose.names, twice=twice, checked=checked, room=room)
        case "weights":
            return cost.inspection_peak_bytes(work, purpose.top_k)
        case "attribution" if purpose.attributed is not None:
            return cost.attribution_peak_bytes(work, *purpose.attributed)
    return cost.peak_bytes(work, kernel)


def _predicted(work: Workload, kernel: str, purpose: Computation, clock: Clock) -> Estimate:
    match purpose.operation:
        case "gradients":
            both = clock.gradients(work, kernel, twice=purpose.double_backward, checks=purpose.checks)
            return both if purpose.half is None else _half(purpose.half, clock.forward(work, kernel), both)
        case "weights":
            return clock.inspection(work, named=purpose.top_k)
        case "attribution" if purpose.attributed is not None:  # the context, the way back, and the weights again
            once = clock.gradients(cost.plainly(work), kernel) + clock.forward(work, kernel)
            return once + once if purpose.attributed.compared else once
    return clock.forward(work, kernel)


def _half(half: Literal["forward", "backward"], forward: Estimate, both: Estimate) -> Estimate:
    """The time of one of two passes, of which the time of the first and of both together are known."""
    if half == "forward" or both.median <= forward.median:
        return forward
    share = 1 - forward.median / both.median
    return Estimate(both.median * share, both.low * share, both.high * share)

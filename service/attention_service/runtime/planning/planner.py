"""From a bound request to a plan: which kernel, at what cost. Nothing is allocated here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from attention_contract.errors import KernelUnsuitable
from attention_contract.schemas.attention import AttentionInputs, Edit, RawInputs
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.spec import AttentionSpec, Mask
from attention_service import cost
from attention_service.core.arrays import TORCH_DTYPES
from attention_service.core.global_tokens import with_global_tokens
from attention_service.core.kernels import KERNELS, unsuitable
from attention_service.core.kernels.tiling import WHOLE
from attention_service.core.labour import labour
from attention_service.core.methods import approximation_of
from attention_service.core.types import Selection
from attention_service.cost import Clock, Estimate, Workload
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound import Bound
from attention_service.runtime.device import Device
from attention_service.runtime.operations.recurrent import NAMES

QUICK = 64.0
"""Operations that take no longer than what else there is to plan."""
_CELLS = 2**12
"""Tiles of which is told in one operation about as quickly as of one."""


@dataclass(frozen=True)
class Plan:
    """What will run, and what it is expected to cost."""

    kernel: str
    flops: int
    peak_bytes: int
    predicted: Estimate
    laborious: bool = False
    """Whether it consists of so many small operations that its time can't be told from its size."""


def is_quick(masks: Sequence[Mask], queries: int, keys: int, places: int = 1) -> bool:
    """Whether a request is planned about as soon as one without masks. ``places``: sequences that stand elsewhere."""
    if not masks:
        return True
    tiles = -(-queries // WHOLE.queries) * -(-keys // WHOLE.cell)
    return labour(masks) * places * (1 + tiles / _CELLS) <= QUICK


def workload(
    bound: Bound,
    device: Device,
    taps: Iterable[str],
    selection: Selection,
    *,
    edits: Sequence[Edit] = (),
    reported: bool = False,
    averaged: bool = False,
) -> Workload:
    """The sizes of a bound request, as the cost model takes them."""
    mask = bound.arrays.get("mask")
    own = bound.sequence_masks is not None
    offsets = bound.arrays["offsets"].tolist() if "offsets" in bound.arrays else [bound.past] * bound.batch * own
    return Workload(
        batch=bound.batch,
        queries=bound.queries,
        keys=bound.keys,
        past=bound.past,
        heads=bound.heads,
        kv_heads=bound.kv_heads,
        head_dim=bound.head_dim,
        value_dim=bound.value_dim,
        own_key_dim=bound.own_key_dim,
        itemsize=TORCH_DTYPES[bound.dtype].itemsize,
        half=bound.dtype == "float16",
        reply=bound.reply_dtype,
        spec=_planned_spec(bound),
        sizes=bound.module.sizes if bound.module is not None else None,
        taps=frozenset(taps),
        selected_heads=None if selection.heads is None else len(selection.heads),
        selected_queries=None if selection.queries is None else len(selection.queries),
        request_mask_elements=0 if mask is None else mask.size,
        bool_mask=mask is not None and mask.dtype.kind == "b",
        padded=bool({"key_mask", "key_lengths"} & set(bound.arrays)),
        real_keys=_real_keys(bound),
        batched_offsets=own or "offsets" in bound.arrays,
        offsets=tuple(offsets),
        batched_places=bool({"offsets", "positions"} & set(bound.arrays)),
        edits=tuple((edit.tap, _does(edit)) for edit in edits),
        edit_elements=sum(0 if edit.value is None else edit.value.size for edit in edits),
        dropped=bound.dropout is not None,
        sent=frozenset(NAMES) & set(bound.arrays) | ({"return_state"} if bound.state_wanted else set()),
        fine_gate="gate" in bound.arrays and bound.arrays["gate"].ndim == 4,
        reported=reported,
        averaged=averaged,
        inputs=frozenset({"query", "key", "value"} & set(bound.arrays)),
        threads=device.threads,
    )


def _planned_spec(bound: Bound) -> AttentionSpec:
    """The spec; if sequences have global tokens of their own, with as many as any has, spread over the keys.

    Which tokens they are bears little on the cost, so that requests that differ in them alone share a plan.
    """
    if bound.sequence_masks is None:
        return bound.spec
    count, keys = int(bound.arrays["global_mask"].sum(1).max()), bound.keys - bound.extra
    spread = [index * keys // count for index in range(count)]
    return bound.spec.model_copy(update={"masks": with_global_tokens(bound.spec.masks, spread)})


def _real_keys(bound: Bound) -> int:
    """Keys up to the last that is real in any sequence, in whole cells of the blocked kernel; 0 for no padding."""
    lengths, mask = (bound.arrays.get(name) for name in ("key_lengths", "key_mask"))
    if (lengths is None and mask is None) or not bound.batch:
        return 0
    last = 2**62 if lengths is None else int(lengths.max())
    if mask is not None:
        seen = np.flatnonzero(mask.any(0))
        last = min(last, int(seen[-1]) + 1 if len(seen) else 0)
    return -(-max(last, 1) // WHOLE.cell) * WHOLE.cell


def _does(edit: Edit) -> str:
    if edit.renormalize:
        return "renormalize"
    return "value" if edit.value is not None else "scale" if edit.scale is not None else "set"


@dataclass(frozen=True)
class Purpose:
    """What a kernel is chosen for."""

    keeps_weights: bool = False
    """What is asked needs them in memory, as looking at them and gradients with respect to taps do."""
    gradient: bool = False
    """There is a backward pass."""
    names: tuple[str, ...] | None = None
    """With respect to what it is; None for everything that comes in and is learned."""
    double_backward: bool = False
    """Gradients are differentiated again."""


FORWARD = Purpose()


def able_kernels(
    work: Workload, dtype: str, device: Device, wanted: str | None, purpose: Purpose = FORWARD
) -> list[str]:
    """Those that can do it, in the order of their registration; of a method that approximates, its name alone.

    Raises KernelUnsuitable where the one asked for can't, or none can.
    """
    if approximation_of(work.spec) is not None:
        if wanted is not None:
            raise KernelUnsuitable(
                f"kernel: method {work.spec.method.name} has arithmetic of its own, which no kernel computes; leave "
                "kernel out, or take method exact",
                param="kernel",
            )
        return [work.spec.method.name]
    reasons = {
        kernel.name: unsuitable(
            kernel.name,
            work.spec,
            TORCH_DTYPES[dtype],
            edits=work.edited,
            dropout=work.dropped,
            taps_gradient=purpose.keeps_weights,
            double_backward=purpose.double_backward,
            device=device.torch.type,
        )
        for kernel in KERNELS
    }
    able = [name for name, reason in reasons.items() if reason is None]
    if wanted is not None:
        if (reason := reasons[wanted]) is not None:
            raise KernelUnsuitable(
                f"kernel: {wanted} cannot compute this: {reason}; leave kernel out, or ask for {' or '.join(able)}",
                param="kernel",
            )
        return [wanted]
    if not able:
        raise KernelUnsuitable("; ".join(f"{name}: {reason}" for name, reason in reasons.items()), param="spec")
    return able


def choose_kernel(
    work: Workload, dtype: str, device: Device, wanted: str | None, room: int, purpose: Purpose = FORWARD
) -> str:
    """The kernel that was asked for, or the one of least predicted time among those that can do it.

    Of a method that approximates, its name: no kernel computes it.

    Where some would need more than ``room``, in bytes, they are passed over while another does not. Raises
    KernelUnsuitable where the one asked for can't, or none can.
    """
    able = able_kernels(work, dtype, device, wanted, purpose)
    if len(able) == 1:
        return able[0]
    # Without the taps: asking to see them must not change which kernel makes the output.
    bare = cost.plainly(work)
    predict = device.clock.gradients if purpose.gradient else device.clock.forward

    def peak(kernel: str) -> int:
        return bare_peak(bare, kernel, purpose, room)

    ranked = sorted(able, key=lambda kernel: predict(bare, kernel).median)
    return next((kernel for kernel in ranked if peak(kernel) <= room), None) or min(ranked, key=peak)


def bare_peak(work: Workload, kernel: str, purpose: Purpose, room: int) -> int:
    """The bytes by which kernels are passed over: of one pass without taps; of far more than ``room`` at least that."""
    if purpose.gradient:
        return cost.gradient_peak_bytes(work, kernel, purpose.names, room=room)
    return cost.peak_bytes(work, kernel)


def plan_forward(work: Workload, kernel: str, clock: Clock) -> Plan:
    """The cost of one forward pass."""
    compared = cost.flops(cost.exactly(work), masked=False).total if work.reported else 0
    return Plan(
        kernel=kernel,
        flops=cost.executed_flops(work, kernel) + compared,
        peak_bytes=cost.peak_bytes(work, kernel),
        predicted=clock.forward(work, kernel),
        laborious=labour(work.spec.masks) > QUICK,
    )


def plan_gradients(
    work: Workload,
    kernel: str,
    clock: Clock,
    purpose: Purpose,
    *,
    checks: int,
    room: int,
) -> Plan:
    """The cost of a forward and a backward pass, and of as many forward passes in float64 as a check makes.

    Where they need far more than ``room``, in bytes, at least that is told of memory.
    """
    twice = purpose.double_backward
    peak = cost.gradient_peak_bytes(work, kernel, purpose.names, twice=twice, checked=checks > 0, room=room)
    backward = cost.executed_backward_flops(work, kernel)
    return Plan(
        kernel=kernel,
        flops=cost.executed_flops(work, kernel) + backward * (1 + cost.SECOND_PASSES * twice),
        peak_bytes=peak,
        predicted=clock.gradients(work, kernel, twice=twice, checks=checks),
        laborious=labour(work.spec.masks) > QUICK,
    )


def quickly_planned(module: Module | None, request: AttentionInputs) -> bool:
    """Whether a request is planned about as soon as one without masks.

    By the lengths that its tensors seem to have: they are checked when it is bound.
    """
    if isinstance(request, GradientsRequest) and (request.check or request.directions or request.edits):
        return False  # it is rehearsed
    if module is not None:
        masks = module.config.spec.masks
    else:
        masks = request.spec.masks if isinstance(request, RawInputs) else []
    if not masks:
        return True
    if request.global_mask is not None:
        return False
    new = [array.shape[-2] for array in (request.query, request.key) if array is not None and array.ndim > 1]
    past = 0 if request.past_key is None or request.past_key.ndim < 2 else request.past_key.shape[-2]
    places = 1 if request.offsets is None else request.offsets.size
    return is_quick(masks, max(new, default=0), max(new, default=0) + past, places)

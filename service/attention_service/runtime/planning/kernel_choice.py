"""The kernel of a request: the one that it names, or the fastest that can compute it in the memory there is."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import NamedTuple

from attention_contract.errors import InvalidRequest, KernelUnsuitable
from attention_service.core.kernels import KERNELS, Needs, unsuitable
from attention_service.core.methods import approximation_of
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.cost import Clock, Estimate, kernel_of, kind_of, rank_seconds
from attention_service.cost.pairs import fused_mask_elements
from attention_service.cost.rehearsal import LARGEST, Seen
from attention_service.cost.tensor_bytes import input_bytes
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.device.torch_device import Device

PLAIN = Needs()
FAR = 2
"""Nothing is rehearsed if a lower bound already exceeds this many times the capacity."""


Run = Callable[[BoundRequest, str], Seen]
"""Rehearses an operation over a blank request by a kernel."""


class OperationCost(NamedTuple):
    """The cost of one operation over one blank request."""

    peak_bytes: int
    time: Estimate
    result_bytes: int | None = None
    """Bytes of the results; None if they are not counted."""


def able_kernels(bound: BoundRequest, device: Device, wanted: str | None, needs: Needs = PLAIN) -> list[str]:
    """Return the kernel that is wanted, or those that may be chosen and can do it; for an approximation, its name.

    Raises InvalidRequest if the wanted one is not known, and KernelUnsuitable if it cannot do it or none can.
    """
    if wanted is not None and wanted not in KERNELS:
        names = [entry.name for entry in KERNELS]
        near = get_close_matches(wanted, names, 1)
        raise InvalidRequest(
            f"kernel: {wanted[:80]!r} is not known; expected one of {', '.join(names)}"
            + (f"; did you mean {near[0]!r}?" if near else ""),
            param="kernel",
        )
    if approximation_of(bound.spec) is not None:
        if wanted is not None:
            raise KernelUnsuitable.at(
                "kernel",
                f"method {bound.spec.method.name} does not use a kernel; leave kernel out, or take method exact",
            )
        return [bound.spec.method.name]
    reasons = {
        kernel.name: unsuitable(
            kernel.name,
            bound.spec,
            TORCH_DTYPES[bound.dtype],
            replace(needs, dropout=bound.dropped, device=device.torch.type),
        )
        for kernel in KERNELS
    }
    able = [name for name, reason in reasons.items() if reason is None]
    if wanted is not None:
        if (reason := reasons[wanted]) is not None:
            raise KernelUnsuitable.at(
                "kernel", f"{wanted} cannot compute this: {reason}; leave kernel out, or ask for {' or '.join(able)}"
            )
        return [wanted]
    if not able:
        raise KernelUnsuitable("; ".join(f"{name}: {reason}" for name, reason in reasons.items()), param="spec")
    return [name for name in able if KERNELS[name].make().automatic]


def choose_kernel(
    bound: BoundRequest, able: Sequence[str], clock: Clock, capacity: int, peak: Callable[[str], int], *, backward: bool
) -> str:
    """The first of the kernels, ranked by a roofline, that needs no more than ``capacity`` bytes.

    If all need more, the one that needs the least. ``peak``: the bytes of a pass by a kernel which returns the output
    alone, since the tap that a request returns must not change which kernel computes the output.
    """
    if len(able) == 1:
        return able[0]
    ranked = sorted(able, key=lambda kernel: _rank(bound, kernel, clock, backward=backward).median)
    return next((kernel for kernel in ranked if peak(kernel) <= capacity), None) or min(ranked, key=peak)


def _rank(bound: BoundRequest, kernel: str, clock: Clock, *, backward: bool) -> Estimate:
    return clock.rated(lambda rates: rank_seconds(bound, kernel, rates, backward=backward))


def cost_of(
    bound: BoundRequest, kernel: str, device: Device, capacity: int, computation: str, run: Run, *, pairs: bool = False
) -> OperationCost:
    """The peak memory and the time of an operation over a blank request.

    If it needs far more than ``capacity`` bytes, nothing is rehearsed: the memory is a lower bound, and the time that
    by which kernels are ranked. ``pairs``: a method that approximates makes a matrix of weights.
    """
    matrix = bound.itemsize * bound.batch * bound.heads * bound.queries * bound.keys if pairs else 0
    if (least := least_bytes(bound, kernel) + matrix) > FAR * min(capacity, LARGEST):
        return OperationCost(least, _rank(bound, kernel, device.clock, backward=computation == "gradients"), 0)
    rehearsal = run(bound, kernel)
    kind = kind_of(computation, kernel, bound.dtype)
    return OperationCost(
        rehearsal.peak_bytes, device.clock.predict(rehearsal.total(), bound.itemsize, kind), rehearsal.results
    )


def least_bytes(bound: BoundRequest, kernel: str) -> int:
    """Return a lower bound: the inputs, and for an exact kernel a matrix of scores or the masks."""
    holds = kernel_of(bound, kernel).holds
    if approximation_of(bound.spec) is not None or holds == "tiles":
        return input_bytes(bound)
    masks, scores = fused_mask_elements(bound), bound.pairs * bound.heads * (holds == "pairs")
    return input_bytes(bound) + bound.itemsize * max(masks, scores)

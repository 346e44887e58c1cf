"""The kernel of a request: the one that it names, or the fastest that can compute it in the memory there is."""

from difflib import get_close_matches
from typing import Literal, NamedTuple

from attention_contract.errors import InvalidRequest, KernelUnsuitable
from attention_contract.schemas import accuracy
from attention_service import cost
from attention_service.core.kernels import KERNELS, unsuitable
from attention_service.core.methods import approximation_of
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.cost import Workload
from attention_service.runtime.device.torch_device import Device


class Attributed(NamedTuple):
    """Everything in an attribution that determines its cost beside the sizes of the attention."""

    methods: tuple[str, ...]
    compared: bool
    """True if the attributions without the edits are computed too."""
    points: int
    """Points of the path at which L is differentiated."""
    classes: int
    """Classes of the readout; 0 without one."""


class Computation(NamedTuple):
    """The computation that a kernel is chosen for."""

    operation: accuracy.Computation = "forward"
    keeps_weights: bool = False
    """True if the weights must be in memory, as for inspections and for gradients with respect to taps."""
    names: tuple[str, ...] | None = None
    """The targets of gradients; None for everything that comes in and is learned."""
    double_backward: bool = False
    """True if gradients are differentiated again."""
    checks: int = 0
    """Forward passes in float64 of a gradient check."""
    top_k: int = 0
    """Keys that an inspection names for each query."""
    attributed: Attributed | None = None
    """The attributions, if the operation is one."""
    half: Literal["forward", "backward"] | None = None
    """The pass that runs now, if the two passes of gradients run apart."""

    @property
    def gradient(self) -> bool:
        """True if there is a backward pass."""
        return self.operation == "gradients"


FORWARD = Computation()


def able_kernels(
    work: Workload, dtype: str, device: Device, wanted: str | None, purpose: Computation = FORWARD
) -> list[str]:
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
    return [name for name in able if KERNELS[name].make().automatic]


def choose_kernel(
    work: Workload, dtype: str, device: Device, wanted: str | None, room: int, purpose: Computation = FORWARD
) -> str:
    """The wanted kernel, or the one of least predicted time among those that can compute a workload.

    Kernels that would need more than ``room`` bytes are passed over while another does not. Raises as
    ``able_kernels`` does.
    """
    able = able_kernels(work, dtype, device, wanted, purpose)
    if len(able) == 1:
        return able[0]
    # Without the taps: the tap that a request returns must not change which kernel computes the output.
    bare = cost.plainly(work)
    predict = device.clock.gradients if purpose.gradient else device.clock.forward

    def peak(kernel: str) -> int:
        return bare_peak(bare, kernel, purpose, room)

    ranked = sorted(able, key=lambda kernel: predict(bare, kernel).median)
    return next((kernel for kernel in ranked if peak(kernel) <= room), None) or min(ranked, key=peak)


def bare_peak(work: Workload, kernel: str, purpose: Computation, room: int) -> int:
    """The peak by which kernels are passed over: of one pass without taps. Far above ``room`` it is a lower bound."""
    if purpose.gradient:
        return cost.gradient_peak_bytes(work, kernel, purpose.names, room=room)
    return cost.peak_bytes(work, kernel)

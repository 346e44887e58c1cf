"""Peak memory of a forward and a backward pass, by tensor and phase.

The backward pass goes the way of the forward pass back: what autograd kept of a stage is freed once its gradient is
found, so that the largest phase is mostly the end of the forward pass or the normalizer's.
"""

from attention_service.core.cost.approximate import approximated
from attention_service.core.cost.gradient_ends import (
    ends,
    gradient_bytes,
    tap_bytes,
)
from attention_service.core.cost.gradient_kernels import blocked_gradients, fused_gradients
from attention_service.core.cost.gradient_stages import materialized_gradients
from attention_service.core.cost.held import Held
from attention_service.core.cost.memory import peak_bytes
from attention_service.core.cost.method_memory import method_gradient_phases
from attention_service.core.cost.phases import Ledger, Phase, peak_of
from attention_service.core.cost.preparing_memory import prepare
from attention_service.core.cost.tiles import counted_as
from attention_service.core.cost.workload import Workload


def gradient_peak_bytes(work: Workload, *, taps: bool, kernel: str, mask: bool = True) -> int:
    """The most that one forward and one backward pass hold at a time, beyond the resident parameters."""
    return peak_of(gradient_phases(work, taps=taps, kernel=kernel, mask=mask))


def gradient_phases(work: Workload, *, taps: bool, kernel: str, mask: bool = True) -> tuple[Phase, ...]:
    """What is held in each phase of a forward and a backward pass.

    ``taps``: gradients with respect to taps are wanted, which keeps every tap of the materialized pass and a gradient
    for each. ``mask``: one with respect to a mask that is added may be wanted, for which PyTorch's fused kernel keeps
    the weights. Taps that are returned beside the gradients are computed again once the graph is gone.
    """
    kernel = counted_as(kernel)
    if approximated(work) is not None:
        return method_gradient_phases(work, taps=taps)
    biased = mask and work.request_mask_elements > 0 and not work.bool_mask
    ledger = Ledger()
    prepare(ledger, work, graph=True)
    if taps or kernel == "materialized":
        materialized_gradients(ledger, work, taps=taps, mask=biased)
    elif kernel == "blocked":
        blocked_gradients(ledger, work, mask=biased)
    else:
        fused_gradients(ledger, work, mask=biased)
    if work.taps - {"output"}:
        left = Ledger()
        left.hold(inputs=Held.of(work).inputs, output=ends(work), gradients=gradient_bytes(work, mask=biased))
        left.phase("taps again", taps=tap_bytes(work, taps) + peak_bytes(work, kernel))
        return (*ledger.phases, *left.phases)
    return ledger.phases

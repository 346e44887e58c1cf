"""Peak memory of a forward and a backward pass, by tensor and phase; of its check, and of second gradients.

The backward pass goes the way of the forward pass back: what autograd kept of a stage is freed once its gradient is
found, so that the largest phase is mostly the end of the forward pass or the normalizer's.
"""

from dataclasses import replace
from math import prod

from attention_service.core.cost.approximate import approximated, method_check_peak, method_gradient_phases
from attention_service.core.cost.gradient_ends import (
    ends,
    gradient_bytes,
    tap_bytes,
)
from attention_service.core.cost.gradient_kernels import blocked_gradients, fused_gradients
from attention_service.core.cost.gradient_stages import materialized_gradients
from attention_service.core.cost.held import Held
from attention_service.core.cost.memory import peak_bytes
from attention_service.core.cost.pairs import (
    masks_of,
    normalizer_cost,
    score_cost,
    score_itemsize,
    softmax_itemsize,
)
from attention_service.core.cost.phases import Ledger, Phase, peak_of
from attention_service.core.cost.preparing_memory import joined, prepare
from attention_service.core.cost.tensors import parameter_count
from attention_service.core.cost.tiles import counted_as
from attention_service.core.cost.workload import Workload
from attention_service.core.learned import learned_of
from attention_service.core.positions.embeddings import TABLE


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


def check_peak_bytes(work: Workload, *, taps: bool = True) -> int:
    """The most that a check by central differences in float64 holds at a time, what was found before it included.

    That is the gradients once more in float64 with their graph, then, for one name after the other, copies of its
    tensor and two materialized forward passes with their outputs. ``taps``: some of the names are taps.
    """
    if approximated(work) is not None:
        return method_check_peak(work, taps=taps)
    held = Held.of(work)
    found = held.inputs + gradient_bytes(work) + ends(work) + tap_bytes(work, taps)
    double = replace(work, itemsize=8, taps=frozenset({"output"}), selected_heads=None, selected_queries=None)
    wide = Held.of(double)
    parameters = 8 * parameter_count(work)
    graph = gradient_peak_bytes(double, taps=taps, kernel="materialized") + parameters
    probed = replace(double, edits=(("weights", "value"),) if taps else ())
    # Both the graph's leaves and the probe's are held, the gradients, the two outputs and their difference.
    leaves = 2 * (wide.inputs + parameters) + gradient_bytes(double) + 2 * ends(double)
    moved = 4 * max(wide.inputs, parameters, 8 * work.pairs * work.heads if taps else 0)
    probing = leaves + moved + tap_bytes(double, taps) + peak_bytes(probed, "materialized")
    return found + max(graph, probing)


def second_peak_bytes(work: Workload, *, taps: bool) -> int:
    """The most that is held when gradients are differentiated again, with the materialized kernel.

    The first backward pass becomes a graph of its own: of each stage over pairs, what went in, what came out and a
    gradient of either are held, and the gradients of those while the second one is gone through.
    """
    # What dropout draws is gone by then: of it stay which weights are kept, and those in place of all.
    once = gradient_peak_bytes(replace(work, dropped=False), taps=taps, kernel="materialized")
    once += work.pairs * work.heads * work.dropped
    if approximated(work) is not None:  # what went into each of its products, a gradient of each, and theirs
        return 11 * once // 4 + 4 * parameter_count(work) * work.itemsize
    pairs, c, held = work.pairs * work.heads, score_itemsize(work), Held.of(work)
    score = score_cost(work)
    normalizer = normalizer_cost(work)
    # Weights that are made of what is kept are held as narrow as they are used.
    narrowed = softmax_itemsize(work) - work.itemsize if normalizer.fills else 0
    again = pairs * (normalizer.second - narrowed)
    again += 3 * pairs * score.layer * c  # no layer is computed again any more
    again += pairs * c * (work.spec.softcap is not None)
    again += masks_of(work).bias * work.itemsize
    tokens = held.q + held.kv
    again += joined(work) * (tokens if work.sizes is not None else held.kv)
    again += tokens * (3 * (work.spec.qk_norm is not None) + 2 * (score.key_kept > 0))
    # Of a table's second gradient only what its places read is held.
    return once + again + 2 * gradient_bytes(work) - _table_bytes(work)


def _table_bytes(work: Workload) -> int:
    """The table of learned positions."""
    learned = learned_of(work.spec, work.widths)
    return prod(learned[TABLE].shape) * work.itemsize if TABLE in learned else 0

"""Peak memory of a forward and a backward pass, and of its check by central differences.

Three phases can be the largest: the end of the forward pass, with what autograd keeps of it; the attention's own
backward pass; and the backward pass of the projections, when the graph of the attention is gone.
"""

from dataclasses import replace

from attention_service.core.additive import BLOCK
from attention_service.core.cost.approximate import approximated, method_check_peak, method_gradient_peak
from attention_service.core.cost.blocked_memory import backward_tile, blocked_peak, lse_bytes
from attention_service.core.cost.encoding import position_cost
from attention_service.core.cost.encoding_memory import bias_elements
from attention_service.core.cost.fused_memory import (
    fused_arguments,
    fused_factors,
    fused_mask_bytes,
    fused_peak,
    fused_workspace,
)
from attention_service.core.cost.held import Held
from attention_service.core.cost.memory import bias_copies, materialized_peak, peak_bytes, score_tensors, with_margin
from attention_service.core.cost.pairs import (
    fused_masks,
    masks_of,
    normalizer_cost,
    score_cost,
    score_itemsize,
    softmax_itemsize,
)
from attention_service.core.cost.tensors import parameter_count
from attention_service.core.cost.tiles import counted_as
from attention_service.core.cost.workload import Workload
from attention_service.core.normalizers import has_lse


def gradient_peak_bytes(work: Workload, *, taps: bool, kernel: str, mask: bool = True) -> int:
    """The most that one forward and one backward pass hold at a time, beyond the resident parameters.

    ``taps``: gradients with respect to taps are wanted, which keeps every tap of the materialized pass and a gradient
    for each. ``mask``: one with respect to a mask that is added may be wanted, for which PyTorch's fused kernel keeps
    the weights. Taps that are returned beside the gradients are computed again once the graph is gone.
    """
    kernel = counted_as(kernel)
    if approximated(work) is not None:
        return with_margin(method_gradient_peak(work, taps=taps))
    held = Held.of(work)
    biased = mask and work.request_mask_elements > 0 and not work.bool_mask
    if taps or kernel == "materialized":
        forward, backward = _materialized(work, taps=taps)
    elif kernel == "blocked":
        forward, backward = _blocked(work, mask=biased)
    else:
        forward, backward = _fused(work)
        if biased:
            expanded = 3 * held.kv * (work.heads // work.kv_heads) if work.heads != work.kv_heads else 0
            forward, backward = (
                max(fused, written + expanded)
                for fused, written in zip((forward, backward), _materialized(work, taps=False), strict=True)
            )
    leaves = held.inputs + (held.mask if biased else 0)
    gradients = _gradient_bytes(work)
    ends = 2 * (held.output or held.context)  # the output and ∂L/∂output
    projecting = ends + gradients + (_tap_bytes(work, taps) or held.q + held.kv) + held.making.backward
    made = held.made + held.making.graph
    peak = leaves + max(
        held.projecting - held.inputs + held.making.graph, made + forward, made + ends + backward, projecting
    )
    again = 0
    if work.taps - {"output"}:
        again = leaves + ends + gradients + _tap_bytes(work, taps) + peak_bytes(work, kernel)
    return max(with_margin(peak), again)


def check_peak_bytes(work: Workload, *, taps: bool = True) -> int:
    """The most that a check by central differences in float64 holds at a time, what was found before it included.

    That is the gradients once more in float64 with their graph, then, for one name after the other, copies of its
    tensor and two materialized forward passes with their outputs. ``taps``: some of the names are taps.
    """
    if approximated(work) is not None:
        return with_margin(method_check_peak(work, taps=taps))
    held = Held.of(work)
    found = held.inputs + _gradient_bytes(work) + 2 * (held.output or held.context) + _tap_bytes(work, taps)
    double = replace(work, itemsize=8, taps=frozenset({"output"}), selected_heads=None, selected_queries=None)
    wide = Held.of(double)
    parameters = 8 * parameter_count(work)
    graph = gradient_peak_bytes(double, taps=taps, kernel="materialized") + parameters
    # Both the graph's leaves and the probe's are held, the gradients, the two outputs and their difference.
    leaves = 2 * (wide.inputs + parameters) + _gradient_bytes(double) + 4 * (wide.output or wide.context)
    moved = 4 * max(wide.inputs, parameters, 8 * work.pairs * work.heads if taps else 0)
    probing = leaves + moved + _tap_bytes(double, taps) + peak_bytes(replace(double, edited=taps), "materialized")
    return found + max(graph, probing)


def second_peak_bytes(work: Workload, *, taps: bool) -> int:
    """The most that is held when gradients are differentiated again, with the materialized kernel.

    The first backward pass becomes a graph of its own: of each stage over pairs, what went in, what came out and a
    gradient of either are held, and the gradients of those while the second one is gone through.
    """
    once = gradient_peak_bytes(work, taps=taps, kernel="materialized")
    if approximated(work) is not None:  # what went into each of its products, a gradient of each, and theirs
        return 3 * once
    pairs = work.pairs * work.heads
    tensors = 8 if has_lse(work.spec.normalizer) else 5  # over pairs, beside those of the first pass
    layers = 3 * pairs * score_cost(work).layer * score_itemsize(work)  # nothing is computed again any more
    return with_margin(once + tensors * pairs * score_itemsize(work) + layers + 2 * _gradient_bytes(work))


def _materialized(work: Workload, *, taps: bool) -> tuple[int, int]:
    """The end of the stages, and their backward pass, beyond q, k, v, and the output with its gradient.

    Autograd keeps the softmax and the weights over all pairs, and the tanh of a softcap; the backward pass of the
    softmax has a gradient going in and one coming out beside them; another normalizer says what it holds then.
    """
    held = Held.of(work)
    masks = masks_of(work)
    pairs = work.pairs * work.heads
    e, c, n = work.itemsize, score_itemsize(work), softmax_itemsize(work)
    graph = _factors(work) + masks.together + bias_copies(work, masks) + pairs * work.dropped
    graph += bias_elements(work) // work.heads * position_cost(work).pair_kept
    if work.spec.softcap is not None:
        graph += pairs * c
    kinds = score_tensors(work) if taps else 0
    stages = materialized_peak(replace(work, taps=frozenset()), work.heads * work.queries, masks)
    forward = graph + max(kinds - 1, 0) * pairs * c + stages
    flowing_back = 2 * held.context + work.batch * work.kv_heads * work.keys * work.value_dim * e
    normalizer = normalizer_cost(work)
    flowing = normalizer.held_backward
    if taps and (normalizer.apart or e != n):
        flowing = kinds * c + 2 * e + max(flowing, kinds * c + 2 * n)
    elif taps:  # the weights and their gradient, which the normalizer holds too, are the tap's
        flowing = kinds * c + 2 * e + max(flowing - 2 * e, kinds * c)
    if taps:
        flowing_back += held.context + held.merged + 2 * held.q + held.kv
    flowing_back += 2 * n * work.batch * work.heads * work.queries  # which queries look nowhere, and sums over keys
    padding = held.kv if work.padded else 0
    score = score_cost(work)
    flowing_back += score.backward_layers * min(BLOCK, pairs * score.layer) * c
    backward = graph + padding + pairs * flowing + flowing_back + _output_projection(work)
    return forward, max(forward, backward)


def _factors(work: Workload) -> int:
    """The factors of the scores that autograd keeps beside q and k: scaled, widened, laid out for the product."""
    c, score = score_itemsize(work), score_cost(work)
    queries = work.batch * work.heads * work.queries * max(score.query_width, work.head_dim)
    keys = work.batch * work.kv_heads * work.keys * work.head_dim
    heads = work.heads if score.by_query_head else work.kv_heads
    made = work.batch * heads * work.keys * score.key_width
    return c * (queries + made + (keys if work.batch > 1 or c != work.itemsize else 0))


def _fused(work: Workload) -> tuple[int, int]:
    """The call, and its backward pass: three gradients, the context, its gradient, and one contiguous."""
    held = Held.of(work)
    masks = fused_masks(work)
    _, mask = fused_mask_bytes(work, masks)
    contexts = (2 if work.sizes is None else 3) + (1 if masks.any else 0)
    padding = 2 * held.kv if work.padded else 0
    merged = held.merged if work.value_dim < work.head_dim else 0
    # Of what the score makes, the gradient of queries is gone when that of keys is found.
    made = 2 * fused_arguments(work) + fused_factors(work) * 3 // 2
    backward = padding + mask + made + contexts * held.context + merged + held.q + held.kv
    return fused_peak(work) + merged, backward + 2 * fused_workspace(work) + _output_projection(work)


def _blocked(work: Workload, *, mask: bool) -> tuple[int, int]:
    """The call, and its backward pass: a sum for each gradient, narrowed at the end where it is wider than its tensor.

    Beside them is what was kept: the context, which is also the output of raw attention, and the log-sum-exp.
    """
    held = Held.of(work)
    widened = score_itemsize(work) // work.itemsize
    summed = held.q + held.kv + (held.mask if mask else 0)
    gradients = summed * widened + (summed if widened > 1 else 0)
    contexts = held.context * (0 if work.sizes is None else 2)
    backward = gradients + contexts + lse_bytes(work) + backward_tile(work) + _output_projection(work)
    return blocked_peak(work) + held.merged, backward


def _output_projection(work: Workload) -> int:
    """Its gradient, which is found before the attention's."""
    return 0 if work.sizes is None else work.sizes.d_model * (work.heads * work.value_dim + 1) * work.itemsize


def _gradient_bytes(work: Workload) -> int:
    """Of inputs and parameters. Self-attention adds up the gradients of three roles, all held at a time."""
    held = Held.of(work)
    new = work.batch * work.queries * (work.sizes.d_model if work.sizes else 0) * work.itemsize
    partial = (3 - len(work.inputs)) * new
    return held.inputs + partial + parameter_count(work) * work.itemsize


def _tap_bytes(work: Workload, taps: bool) -> int:
    """Every tap that is a tensor of its own, and a gradient for each."""
    if not taps:
        return 0
    held = Held.of(work)
    pairs = work.pairs * work.heads * (score_tensors(work) * score_itemsize(work) + work.itemsize)
    return 2 * (pairs + held.q + held.kv + held.context)

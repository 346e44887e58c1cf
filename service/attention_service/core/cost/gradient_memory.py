"""Peak memory of a forward and a backward pass, by tensor and phase; of its check, and of second gradients.

The backward pass goes the way of the forward pass back: what autograd kept of a stage is freed once its gradient is
found, so that the largest phase is mostly the end of the forward pass or the normalizer's.
"""

from dataclasses import replace

from attention_service.core.additive import BLOCK
from attention_service.core.cost.approximate import approximated, method_check_peak, method_gradient_phases
from attention_service.core.cost.blocked_memory import backward_tile, blocked
from attention_service.core.cost.encoding import position_cost
from attention_service.core.cost.fused_blocks_memory import fused_blocks, fused_blocks_backward, in_layout
from attention_service.core.cost.fused_memory import (
    fused,
    fused_backward_workspace,
    fused_factors,
    fused_width,
    keeps_layout,
)
from attention_service.core.cost.held import Held
from attention_service.core.cost.memory import output_of, peak_bytes, score_tensors
from attention_service.core.cost.pairs import (
    fused_masks,
    masks_of,
    normalizer_cost,
    score_cost,
    score_itemsize,
    softmax_itemsize,
)
from attention_service.core.cost.phases import Ledger, Phase, peak_of
from attention_service.core.cost.preparing_memory import Apart, joined, prepare
from attention_service.core.cost.stages_memory import Factors, Rows, bias_elements, stages
from attention_service.core.cost.tensors import input_tensors, mask_bytes, parameter_count
from attention_service.core.cost.tiles import by_fused, counted_as
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
        _materialized(ledger, work, taps=taps, mask=biased)
    elif kernel == "blocked":
        _blocked(ledger, work, mask=biased)
    else:
        _fused(ledger, work, mask=biased)
    if work.taps - {"output"}:
        left = Ledger()
        left.hold(inputs=Held.of(work).inputs, output=_ends(work), gradients=_gradient_bytes(work, mask=biased))
        left.phase("taps again", taps=_tap_bytes(work, taps) + peak_bytes(work, kernel))
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
    found = held.inputs + _gradient_bytes(work) + _ends(work) + _tap_bytes(work, taps)
    double = replace(work, itemsize=8, taps=frozenset({"output"}), selected_heads=None, selected_queries=None)
    wide = Held.of(double)
    parameters = 8 * parameter_count(work)
    graph = gradient_peak_bytes(double, taps=taps, kernel="materialized") + parameters
    # Both the graph's leaves and the probe's are held, the gradients, the two outputs and their difference.
    leaves = 2 * (wide.inputs + parameters) + _gradient_bytes(double) + 2 * _ends(double)
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
        return 11 * once // 4 + 4 * parameter_count(work) * work.itemsize
    pairs, c, held = work.pairs * work.heads, score_itemsize(work), Held.of(work)
    score = score_cost(work)
    again = pairs * normalizer_cost(work).second + 3 * pairs * score.layer * c  # no layer is computed again any more
    again += pairs * c * (work.spec.softcap is not None)
    again += masks_of(work).bias * work.itemsize
    tokens = held.q + held.kv
    again += tokens * (joined(work) + 3 * (work.spec.qk_norm is not None) + 2 * (score.key_kept > 0))
    return once + again + 2 * _gradient_bytes(work)


def _materialized(ledger: Ledger, work: Workload, *, taps: bool, mask: bool) -> None:
    """The stages and their backward pass."""
    e, c, n, pairs = work.itemsize, score_itemsize(work), softmax_itemsize(work), work.pairs * work.heads
    rows, factors = Rows(work.heads, work.queries), Factors.of(work, Rows(work.heads, work.queries))
    score, normalizer, held = score_cost(work), normalizer_cost(work), Held.of(work)
    stages(ledger, work, rows, masks_of(work), frozenset({"context"}), graph=True)
    kinds = score_tensors(work) if taps else 0
    if taps:
        # Every kind of scores, and the weights, which are there anyway unless dropout makes others of them.
        ledger.hold(taps=kinds * pairs * c)
    _end_of_forward(ledger, work, merged=True)
    plain = not score.query_width
    saved_q = not (plain and (score.scaled or factors.laid_query or c != e))
    saved_k = bool(score.key_width) or not (factors.laid_key or c != e or work.padded)
    saved_v = not (work.padded or (Apart.of(work).v and work.batch > 1))
    for name, stays in (("q", saved_q or taps), ("k", saved_k or taps), ("v", saved_v or taps)):
        if not stays:
            ledger.drop(name)
    _project_out_backward(ledger, work, taps=taps)
    of_v = work.batch * work.kv_heads * work.keys * work.value_dim * e
    ledger.phase("backward of the context", of_weights=pairs * e, of_values=of_v)
    ledger.hold(gradients=of_v)
    ledger.drop("flowing", "values")
    if not taps:
        ledger.drop("v")
    ledger.hold(flowing=pairs * e)
    if taps and work.sizes is not None:
        ledger.hold(gradients=held.context)
    if work.dropped:
        ledger.phase("backward of dropout", of_weights=pairs * e)
        ledger.drop("dropout")
    if (normalizer.apart or e != n) and not taps:
        ledger.drop("weights")
    if e != n:
        ledger.phase("backward of the weights", of_weights=pairs * n)
    if taps:
        ledger.hold(gradients=pairs * e)
        if e == n:
            ledger.drop("flowing")
    kept = ledger.held.pop("normalized", 0) or ledger.held.pop("weights", 0)
    ledger.drop("flowing")
    shared = pairs * n if taps and e == n and not normalizer.fills else 0  # the gradient of the weights is the tap's
    ledger.phase("backward of the weights", normalizing=pairs * normalizer.held_backward - shared)
    if taps and not normalizer.apart and e == n:
        ledger.hold(weights=kept)
    ledger.hold(flowing=pairs * c)
    _hidden_backward(ledger, work, rows, pairs * c, taps=taps, mask=mask)
    _score_backward(ledger, work, factors)
    _project_backward(ledger, work, taps=taps, mask=mask)


def _score_backward(ledger: Ledger, work: Workload, factors: Factors) -> None:
    """From the scores back to queries and keys."""
    c, score = score_itemsize(work), score_cost(work)
    of_q = factors.query or work.batch * work.heads * work.queries * work.head_dim * c
    of_k = factors.key or work.batch * work.kv_heads * work.keys * work.head_dim * c
    layers = score.backward_layers * min(BLOCK, work.pairs * work.heads * score.layer) * c
    ledger.phase("backward of the scores", of_queries=of_q, of_keys=of_k, layers=layers)
    ledger.drop("flowing", "graph")
    ledger.phase("backward of q and k", flowing=of_q + of_k + (factors.wide or of_q))


def _hidden_backward(ledger: Ledger, work: Workload, rows: Rows, scores: int, *, taps: bool, mask: bool) -> None:
    """From the masked scores back to the scores."""
    masks = masks_of(work)
    if masks.any:
        ledger.phase("backward of the mask", of_scores=scores)
        if taps:
            ledger.hold(gradients=scores)
        if mask:
            ledger.hold(gradients=mask_bytes(work))
        ledger.drop("mask")
    if (elements := bias_elements(work)) and (kept := position_cost(work).pair_kept):
        of_bias = elements * score_itemsize(work) if elements < rows.pairs(work) else 0
        ledger.phase("backward of the bias", of_bias=of_bias)
        ledger.lessen("graph", elements // work.heads * kept)
    if work.spec.softcap is not None:
        ledger.phase("backward of the softcap", of_scores=scores)
        ledger.drop("capped")
        if taps:
            ledger.hold(gradients=scores)


def _fused(ledger: Ledger, work: Workload, *, mask: bool) -> None:
    """The call, and its backward pass: a gradient of each argument."""
    held, masks = Held.of(work), fused_masks(work)
    if mask:
        _written_out(ledger, work)
        return
    fused(ledger, work, graph=True)
    if score_cost(work).query_width:
        each, c = work.batch * work.itemsize, score_cost(work)
        ledger.hold(graph=each * (work.heads * work.queries * c.query_kept + work.kv_heads * work.keys * c.key_kept))
    if work.padded:  # only their copies without padding are kept
        ledger.drop("k", "v")
    _end_of_forward(ledger, work, merged=not keeps_layout(work), keeps_context=True)
    _project_out_backward(ledger, work, taps=False)
    if masks.any:
        ledger.phase("backward of the mask", flowing=held.context)
        ledger.drop("flowing")
        ledger.hold(flowing=held.context)
    values = held.kv * work.value_dim // (work.head_dim + work.value_dim)
    width = fused_width(work) if work.threads else 0
    of_values = values * max(width, work.value_dim) // max(work.value_dim, 1)
    score = score_cost(work)
    made = bool(fused_factors(work))
    of_q = held.q * max(width, made * score.query_width or work.head_dim) // max(work.head_dim, 1)
    of_k = (held.kv - values) * max(width, made * score.key_width or work.head_dim) // max(work.head_dim, 1)
    of_factors = of_q + of_k
    workspace = fused_backward_workspace(work)
    ledger.phase("backward of attention", gradients=of_factors + of_values, workspace=workspace)
    ledger.drop("graph", "mask", "padding", "factors", "arguments", "context", "flowing")
    ledger.hold(gradients=held.kv * work.value_dim // (work.head_dim + work.value_dim))
    _project_backward(ledger, work, taps=False, mask=mask)


def _written_out(ledger: Ledger, work: Workload) -> None:
    """PyTorch's own stages, which it takes where the mask needs a gradient; half types are widened in them."""
    held, masks, pairs = Held.of(work), fused_masks(work), work.pairs * work.heads
    a = max(work.itemsize, 4)
    grown = a // work.itemsize
    groups = work.heads // work.kv_heads
    told = masks.combined * a
    ledger.hold(graph=masks.combined + told + masks.together)
    ledger.phase("mask", mask=2 * masks.combined * a + (masks.combined * a if masks.together else 0))
    ledger.hold(factors=(held.q + held.kv * groups) * grown)
    if grown == 1 and groups == 1:  # the values serve as they are
        ledger.lessen("factors", held.kv * work.value_dim // (work.head_dim + work.value_dim))
    ledger.phase("weights", scores=pairs * a, weights=pairs * a)
    ledger.hold(weights=pairs * a)
    ledger.hold(context=held.context)
    ledger.phase("context", context=held.context * grown)
    ledger.drop("q", "k")  # scaled, they are other tensors
    if grown > 1 or groups > 1:
        ledger.drop("v")
    _end_of_forward(ledger, work, merged=True)
    _project_out_backward(ledger, work, taps=False)
    of_values = held.kv * groups * grown * work.value_dim // (work.head_dim + work.value_dim)
    ledger.phase("backward of attention", of_values=of_values, of_weights=pairs * a)
    ledger.drop("flowing")
    if grown > 1 or groups > 1:
        ledger.lessen("factors", of_values)
    ledger.phase("backward of attention", of_values=of_values, of_weights=pairs * a, of_scores=pairs * a)
    ledger.drop("weights")
    ledger.phase("backward of the mask", of_values=of_values, of_scores=pairs * a, of_mask=2 * told + masks.combined)
    ledger.drop("factors", "q", "k", "v", "graph", "flowing")
    _project_backward(ledger, work, taps=False, mask=True)


def _blocked(ledger: Ledger, work: Workload, *, mask: bool) -> None:
    """The call, and its backward pass: a sum for each gradient, narrowed at the end where it is wider."""
    held = Held.of(work)
    if by_fused(work):
        _fused_blocks(ledger, work, held)
        return
    blocked(ledger, work, graph=True)
    _end_of_forward(ledger, work, merged=True, keeps_context=True)
    _project_out_backward(ledger, work, taps=False)
    widened = score_itemsize(work) // work.itemsize
    summed = held.q + held.kv + (mask_bytes(work) if mask else 0)
    ledger.hold(sums=summed * widened)
    backward_tile(ledger, work, mask=mask)
    if widened > 1:
        ledger.phase("backward of attention", gradients=summed)
    ledger.drop("sums", "context", "lse", "flowing", "q", "k", "v")
    ledger.hold(gradients=held.kv * work.value_dim // (work.head_dim + work.value_dim))
    _project_backward(ledger, work, taps=False, mask=mask)


def _fused_blocks(ledger: Ledger, work: Workload, held: Held) -> None:
    """Blocks of the fused kernel, forward and back."""
    fused_blocks(ledger, work, graph=True)
    kept = score_cost(work)
    if kept.query_width:
        each = work.batch * work.itemsize
        ledger.hold(
            graph=each * (work.heads * work.queries * kept.query_kept + work.kv_heads * work.keys * kept.key_kept)
        )
    _end_of_forward(ledger, work, merged=not in_layout(work), keeps_context=True)
    _project_out_backward(ledger, work, taps=False)
    fused_blocks_backward(ledger, work)
    ledger.drop("sums", "context", "graph", "flowing", "arguments", "factors", "q", "k", "v")
    ledger.hold(gradients=held.kv * work.value_dim // (work.head_dim + work.value_dim))
    _project_backward(ledger, work, taps=False, mask=False)


def _end_of_forward(ledger: Ledger, work: Workload, *, merged: bool, keeps_context: bool = False) -> None:
    """The output, and its gradient as it is sent."""
    if work.sizes is None:
        ledger.rename("context", "output")
        ledger.phase("output and upstream", upstream=Held.of(work).context)
        ledger.hold(upstream=Held.of(work).context)
        return
    merges = merged and work.heads > 1 and work.queries > 1
    ledger.phase("project out", merged=Held.of(work).context if merges else 0, output=output_of(work))
    if merges and not keeps_context:
        ledger.rename("context", "merged")
    elif merges:
        ledger.hold(merged=Held.of(work).context)
    ledger.hold(output=output_of(work))
    ledger.phase("output and upstream", upstream=_ends(work) // 2)
    ledger.hold(upstream=_ends(work) // 2)


def _project_out_backward(ledger: Ledger, work: Workload, *, taps: bool) -> None:
    """The gradient of the context, and of the output projection."""
    if work.sizes is None:
        return
    context, lying = Held.of(work).context, work.batch > 1 and work.heads > 1 and work.queries > 1
    weights = work.sizes.d_model * (work.heads * work.value_dim + 1) * work.itemsize
    ledger.phase("backward of the output projection", gradients=weights, flowing=context)
    if not taps:
        ledger.drop("merged")
    ledger.hold(gradients=weights)
    ledger.phase("backward of the output projection", flowing=context * (2 if lying else 1))
    ledger.hold(flowing=context)


def _project_backward(ledger: Ledger, work: Workload, *, taps: bool, mask: bool) -> None:
    """The gradients of q, k and v, and then of what they were made of."""
    held, e, wide = Held.of(work), work.itemsize, max(work.itemsize, 4)
    queries = held.q // e
    keys = work.batch * work.kv_heads * work.new_keys * work.head_dim
    made = ledger.held.pop("gradients", 0)
    ledger.drop("q", "k", "v", "q and k", "graph")
    if work.spec.qk_norm is not None:
        # That of the keys goes first, with five tensors on its way beside what is kept of the queries.
        kept = queries * wide + ((queries + keys) * wide if e < wide or work.sizes is not None else 0)
        largest = max(5 * keys * wide + kept, 5 * queries * wide)
        ledger.phase("backward of the norm", gradients=made + held.q, normed=largest)
    if position_cost(work).turned:
        turning = 5 * wide * max(queries, keys) // 2
        ledger.phase("backward of the turn", gradients=made + held.q + keys * e, turned=turning)
    ledger.drop("angles")
    gradients = _gradient_bytes(work, mask=mask)
    if joined(work):  # those of the past, or of what the spec adds, are parts of those of all keys
        gradients -= input_tensors(work)["past"]
    cost, table = position_cost(work, work.sizes.d_model if work.sizes else work.head_dim), 0
    if cost.table_elements:  # one row of the table for each place that there is
        table = learned_of(work.spec, work.widths)[TABLE].shape[0] * cost.table_elements * e
        gradients -= table
    rows = cost.table_elements * (work.batch if work.batched_places else 1) * work.queries * wide
    if work.sizes is None:
        own = joined(work) or work.spec.qk_norm is not None or position_cost(work).turned > 0
        of_taps = _tap_bytes(work, taps) // 2 - (0 if own or not taps else held.q + held.kv)
        of_taps -= held.context if taps else 0  # which is ∂L/∂output
        past = held.kv if joined(work) and not taps else 0
        # The table's two gradients, of queries and of keys, are added up.
        ledger.phase("gradients", gradients=gradients + past + of_taps + 2 * table, encoding=rows)
        return
    flowing = held.q + held.kv + (_tap_bytes(work, taps) // 2 + held.q if taps else 0)
    ledger.phase("backward of the projections", gradients=gradients, flowing=flowing)
    if table:
        new = work.batch * work.queries * work.sizes.d_model * e
        ledger.drop("encoded")
        left = gradients - (3 - len(work.inputs)) * new + _tap_bytes(work, taps) // 2
        ledger.phase("backward of the encoding", gradients=left + table, encoding=rows)


def _ends(work: Workload) -> int:
    """The output and ∂L/∂output."""
    held = Held.of(work)
    return 2 * (held.output or held.context)


def _gradient_bytes(work: Workload, *, mask: bool = False) -> int:
    """Of inputs and parameters. Self-attention adds up the gradients of three roles, all held at a time."""
    held = Held.of(work)
    new = work.batch * work.queries * (work.sizes.d_model if work.sizes else 0) * work.itemsize
    partial = (3 - len(work.inputs)) * new
    told = 0 if mask else mask_bytes(work)
    return held.inputs - told + partial + (parameter_count(work) * work.itemsize if work.sizes is not None else 0)


def _tap_bytes(work: Workload, taps: bool) -> int:
    """Every tap that is a tensor of its own, and a gradient for each."""
    if not taps:
        return 0
    held = Held.of(work)
    pairs = work.pairs * work.heads * (score_tensors(work) * score_itemsize(work) + work.itemsize)
    return 2 * (pairs + held.q + held.kv + held.context)

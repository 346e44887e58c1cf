"""Memory where gradients begin and end: the output and its gradient, and those of the projections and inputs."""

from attention_service.core.cost.encoding import position_cost
from attention_service.core.cost.held import Held
from attention_service.core.cost.pairs import (
    score_itemsize,
)
from attention_service.core.cost.phases import Ledger
from attention_service.core.cost.preparing_memory import joined
from attention_service.core.cost.stages_memory import score_kinds
from attention_service.core.cost.tensors import input_tensors, mask_bytes, output_of, parameter_count
from attention_service.core.cost.workload import Workload
from attention_service.core.learned import learned_of
from attention_service.core.positions.embeddings import TABLE


def end_of_forward(ledger: Ledger, work: Workload, *, merged: bool, keeps_context: bool = False) -> None:
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
    ledger.phase("output and upstream", upstream=ends(work) // 2)
    ledger.hold(upstream=ends(work) // 2)


def project_out_backward(ledger: Ledger, work: Workload, *, taps: bool) -> None:
    """The gradient of the context, and of the output projection."""
    if work.sizes is None:
        return
    context, lying = Held.of(work).context, work.batch > 1 and work.heads > 1 and work.queries > 1
    weights = work.sizes.d_model * (work.heads * work.value_dim + 1) * work.itemsize * ("parameters" in work.wrt)
    ledger.phase("backward of the output projection", gradients=weights, flowing=context)
    if not taps:
        ledger.drop("merged")
    ledger.hold(gradients=weights)
    ledger.phase("backward of the output projection", flowing=context * (2 if lying else 1))
    ledger.hold(flowing=context)


def project_backward(ledger: Ledger, work: Workload, *, taps: bool, mask: bool) -> None:
    """The gradients of q, k and v, and then of what they were made of."""
    held, e, wide = Held.of(work), work.itemsize, max(work.itemsize, 4)
    queries = held.q // e
    keys = work.batch * work.kv_heads * work.new_keys * work.head_dim
    made = ledger.held.pop("gradients", 0)
    ledger.drop("q", "k", "v", "q and k", "graph", "far", "apart", "waiting")
    if work.spec.qk_norm is not None:
        # That of the keys goes first, with five tensors on its way beside what is kept of the queries.
        kept = queries * wide + ((queries + keys) * wide if e < wide or work.sizes is not None else 0)
        largest = max(5 * keys * wide + kept, 5 * queries * wide)
        ledger.phase("backward of the norm", gradients=made + held.q, normed=largest)
    if position_cost(work).turned:
        turning = 5 * wide * max(queries, keys) // 2
        ledger.phase("backward of the turn", gradients=made + held.q + keys * e, turned=turning)
    ledger.drop("angles")
    gradients = gradient_bytes(work, mask=mask)
    if joined(work):  # those of the past, or of what the spec adds, are parts of those of all keys
        gradients -= input_tensors(work)["past"]
    cost, table = position_cost(work, work.sizes.d_model if work.sizes else work.head_dim), 0
    if cost.table_elements:  # one row of the table for each place that there is
        table = learned_of(work.spec, work.widths)[TABLE].shape[0] * cost.table_elements * e
        gradients -= table
    rows = cost.table_elements * (work.batch if work.batched_places else 1) * work.queries * wide
    if work.sizes is None:
        own = joined(work) or work.spec.qk_norm is not None or position_cost(work).turned > 0
        of_taps = tap_bytes(work, taps) // 2 - (0 if own or not taps else held.q + held.kv)
        of_taps -= held.context if taps else 0  # which is ∂L/∂output
        past = held.kv if joined(work) and not taps else 0
        # The table's two gradients, of queries and of keys, are added up.
        ledger.phase("gradients", gradients=gradients + past + of_taps + 2 * table, encoding=rows)
        return
    if taps or work.apart:
        flowing = held.q + held.kv + held.far + (tap_bytes(work, taps) // 2 + held.q if taps else 0)
        ledger.phase("backward of the projections", gradients=gradients, flowing=flowing)
    else:
        _one_by_one(ledger, work, gradients)
    if table:
        new = work.batch * work.queries * work.sizes.d_model * e
        ledger.drop("encoded")
        left = gradients - (3 - len(work.inputs)) * new + tap_bytes(work, taps) // 2
        ledger.phase("backward of the encoding", gradients=left + table, encoding=rows)


def _one_by_one(ledger: Ledger, work: Workload, gradients: int) -> None:
    """The projections of values, keys and queries: what flows into one is laid out and gone once its gradients are."""
    sizes, tokens = work.sizes, (work.new_keys, work.new_keys, work.queries)
    if sizes is None:
        return
    e, learned = work.itemsize, "parameters" in work.wrt
    outward = (sizes.kv_heads * sizes.value_dim, sizes.kv_heads * sizes.head_dim, sizes.heads * sizes.head_dim)
    inward = (sizes.value_width, sizes.key_width, sizes.d_model)
    made = [
        work.batch * length * wide * e + learned * (wide + 1) * narrow * e
        for length, wide, narrow in zip(tokens, inward, outward, strict=True)
    ]
    flowing = [work.batch * length * narrow * e for length, narrow in zip(tokens, outward, strict=True)]
    for last in range(3):
        still = gradients - sum(made[last + 1 :])
        ledger.phase("backward of the projections", gradients=still, flowing=sum(flowing[last:]))
        ledger.phase(
            "backward of the projections", gradients=still - made[last], flowing=sum(flowing[last:]) + flowing[last]
        )
    ledger.phase("backward of the projections", gradients=gradients)


def ends(work: Workload) -> int:
    """The output and ∂L/∂output."""
    held = Held.of(work)
    return 2 * (held.output or held.context)


def gradient_bytes(work: Workload, *, mask: bool = False) -> int:
    """Of inputs and parameters. Self-attention adds up the gradients of three roles, all held at a time."""
    held = Held.of(work)
    new = work.batch * work.queries * (work.sizes.d_model if work.sizes else 0) * work.itemsize
    partial = (3 - len(work.inputs)) * new
    told = 0 if mask else mask_bytes(work)
    learned = parameter_count(work) if work.sizes is not None and "parameters" in work.wrt else 0
    return held.inputs - told + partial + learned * work.itemsize


def tap_bytes(work: Workload, taps: bool) -> int:
    """Every tap that is a tensor of its own, and a gradient for each."""
    if not taps:
        return 0
    held = Held.of(work)
    pairs = work.pairs * work.heads * (score_kinds(work) * score_itemsize(work) + work.itemsize)
    return 2 * (pairs + held.q + held.kv + held.context)

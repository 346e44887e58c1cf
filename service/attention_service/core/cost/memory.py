"""Peak memory of a forward pass, counted by tensor and phase before any of them is made.

The order of phases is that of the computation: project, put the past before the new keys, mask, score, normalize, weigh
the values, project out. Each phase names what is held while it runs; the peak is the largest.
"""

from dataclasses import replace

from attention_service.core.blocks import rows_at_once
from attention_service.core.cost.approximate import approximated, exactly
from attention_service.core.cost.blocked_memory import blocked
from attention_service.core.cost.factors_memory import Rows
from attention_service.core.cost.fused_blocks_memory import fused_blocks, in_layout
from attention_service.core.cost.fused_memory import fused, keeps_layout
from attention_service.core.cost.held import Held
from attention_service.core.cost.method_memory import method_phases
from attention_service.core.cost.pairs import fused_masks, masks_of
from attention_service.core.cost.phases import Ledger, Phase, peak_of
from attention_service.core.cost.preparing_memory import prepare
from attention_service.core.cost.selected_memory import BLOCKED_TAPS, PAIR_TAPS, again, narrow, rows_of
from attention_service.core.cost.stages_memory import stages
from attention_service.core.cost.tensors import output_of
from attention_service.core.cost.tiles import by_fused, counted_as
from attention_service.core.cost.workload import Workload, once


def peak_bytes(work: Workload, kernel: str) -> int:
    """The most that one forward pass holds at a time on its device, beyond the resident parameters.

    What the libraries below hold for themselves (a cuBLAS workspace, an allocator's rounding) is not in it, nor are
    copies of the reply on the host.
    """
    return peak_of(memory_phases(work, kernel))


@once
def memory_phases(work: Workload, kernel: str) -> tuple[Phase, ...]:
    """What is held in each phase of one forward pass, by tensor."""
    kernel = counted_as(kernel)
    if approximated(work) is not None:
        phases = method_phases(work)
        return (*phases, _comparison(work)) if work.reported else phases
    ledger = Ledger()
    prepare(ledger, work)
    rows = Rows(work.heads, work.queries)
    if kernel == "materialized":
        stages(ledger, work, rows, masks_of(work), work.taps - {"output"} | {"context"})
        narrow(ledger, work, work.taps, whole="taps")
    else:
        if kernel == "fused":
            fused(ledger, work)
        elif by_fused(work):
            fused_blocks(ledger, work)
        else:
            blocked(ledger, work)
        far_rows(ledger, work)
        kept = work.taps & (BLOCKED_TAPS if kernel == "blocked" and not work.apart else {"context"})
        again(ledger, work, work.taps - kept)
        narrow(ledger, work, kept, whole="lse", scattered=kernel == "fused" and not fused_masks(work).any)
    _project_out(ledger, work, laid_out=laid_out(work, kernel))
    return ledger.phases


def far_rows(ledger: Ledger, work: Workload) -> None:
    """The context of queries that are projected apart, beside a kernel that knows of none; and both put together."""
    if not work.apart:
        return
    context, held = ledger.held.get("context", 0), dict(ledger.held)
    masks = masks_of(work)
    few = rows_of(masks, work.apart, work.queries) if masks.any else masks
    stages(ledger, work, Rows(work.heads, work.apart), few, frozenset({"context"}))
    ledger.held = held
    ledger.phase("queries apart", copied=context)


def laid_out(work: Workload, kernel: str) -> bool:
    """Whether a kernel makes the context with its heads side by side in each token."""
    if kernel == "fused":
        return keeps_layout(work)
    return kernel == "blocked" and by_fused(work) and in_layout(work)


def _project_out(ledger: Ledger, work: Workload, *, laid_out: bool) -> None:
    """The output of a module; ``laid_out``: the context's heads lie side by side in each token already."""
    if work.sizes is None:
        return
    copied = not laid_out and work.heads > 1 and work.queries > 1
    ledger.phase("project out", merged=Held.of(work).context if copied else 0, output=output_of(work))


def _comparison(work: Workload) -> Phase:
    """Exact attention beside an approximation, block by block: its context, and two matrices of weights of a block."""
    held = Held.of(work)
    rows = min(work.queries, rows_at_once(work.batch, work.heads, work.keys))
    block = exactly(replace(work, taps=frozenset({"weights"}), selected_heads=None, selected_queries=None))
    masks = masks_of(block)
    if masks.any:
        masks = rows_of(masks, rows, max(work.queries, 1))
    ledger = Ledger()
    stages(ledger, block, Rows(work.heads, rows), masks, frozenset({"weights", "context"}))
    exact = max(phase.bytes for phase in ledger.phases)
    method, a = approximated(work), max(work.itemsize, 4)
    width = 0 if method is None else method.implied_width(work.head_dim)
    implied = 0
    if width:  # the weights, those implied and two steps on the way, then of one sequence both, their parts and sums
        pairs = work.batch * work.heads * rows * work.keys
        features = work.batch * work.heads * (work.keys + rows) * width * a
        implied = pairs * (work.itemsize + 3 * a) + 5 * 8 * pairs // max(work.batch, 1) + features
    outputs = 3 * (held.output or held.context) + 3 * held.context
    differences = 3 * 8 * (held.output or held.context) // work.itemsize
    kept = {"problem": held.problem, "outputs": outputs}
    return Phase("compare with exact attention", kept | {"comparison": max(exact, implied, differences)})


def makes_pairs(work: Workload, kernel: str) -> tuple[bool, bool]:
    """Whether the request holds tensors over all pairs: for each head, and such as heads share."""
    kernel = counted_as(kernel)
    whole = work.selected_queries is None
    if kernel == "blocked":
        return whole and bool(work.taps & (PAIR_TAPS - {"lse"})), False
    by_head = kernel != "fused" or (whole and bool(work.taps & PAIR_TAPS))
    return by_head, (fused_masks(work) if kernel == "fused" else masks_of(work)).any

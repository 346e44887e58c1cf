"""Peak memory of a forward pass, counted by tensor and phase before any of them is made.

The order of phases is that of the computation: project, put the past before the new keys, mask, score, normalize, weigh
the values, project out. Each phase names what is held while it runs; the peak is the largest.
"""

from dataclasses import replace

from attention_service.core.blocks import rows_at_once
from attention_service.core.cost.approximate import approximated, exactly, method_phases
from attention_service.core.cost.blocked_memory import blocked
from attention_service.core.cost.fused_blocks_memory import fused_blocks, in_layout
from attention_service.core.cost.fused_memory import fused, keeps_layout
from attention_service.core.cost.held import Held
from attention_service.core.cost.pairs import Masks, fused_masks, masks_of, score_itemsize, softmax_itemsize
from attention_service.core.cost.phases import Ledger, Phase, peak_of
from attention_service.core.cost.preparing_memory import prepare
from attention_service.core.cost.stages_memory import SCORE_TAPS, Rows, bias_elements, stages
from attention_service.core.cost.tensors import tap_elements
from attention_service.core.cost.tiles import by_fused, counted_as
from attention_service.core.cost.workload import Workload

_NORMALIZED = frozenset({"weights", "lse"})
PAIR_TAPS = SCORE_TAPS | _NORMALIZED
"""Taps for which every score of the selected heads and queries is needed."""
_PROJECTED = frozenset({"q", "k", "v"})


def peak_bytes(work: Workload, kernel: str) -> int:
    """The most that one forward pass holds at a time on its device, beyond the resident parameters.

    What the libraries below hold for themselves (a cuBLAS workspace, an allocator's rounding) is not in it, nor are
    copies of the reply on the host.
    """
    return peak_of(memory_phases(work, kernel))


def memory_phases(work: Workload, kernel: str) -> tuple[Phase, ...]:
    """What is held in each phase of one forward pass, by tensor."""
    kernel = counted_as(kernel)
    if approximated(work) is not None:
        phases = method_phases(work)
        return (*phases, _comparison(work)) if work.reported else phases
    ledger = Ledger()
    prepare(ledger, work)
    rows, whole = Rows(work.heads, work.queries), work.selected_heads is None and work.selected_queries is None
    if kernel == "materialized":
        stages(ledger, work, rows, masks_of(work), work.taps - {"output"} | {"context"})
        if not whole:
            ledger.phase("select", selected=_selected(work) + _narrowing(work))
            ledger.drop("taps")
            ledger.hold(taps=_selected(work))
    else:
        if kernel == "fused":
            fused(ledger, work)
        elif by_fused(work):
            fused_blocks(ledger, work)
        else:
            blocked(ledger, work)
        _again(ledger, work, work.taps - ({"lse"} if kernel == "blocked" else set()))
    _project_out(ledger, work, laid_out=laid_out(work, kernel))
    return ledger.phases


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


def output_of(work: Workload) -> int:
    """Bytes of a module's output."""
    return tap_elements(work, "output") * work.itemsize


def _again(ledger: Ledger, work: Workload, taps: frozenset[str]) -> None:
    """The taps that a kernel does not keep, computed again for the selected heads and queries."""
    heads = work.heads if work.selected_heads is None else work.selected_heads
    queries = work.queries if work.selected_queries is None else work.selected_queries
    apart = taps & {"lse"} if not taps & (PAIR_TAPS - {"lse"}) else frozenset()
    for some in (apart, taps - apart):
        asked = some & (PAIR_TAPS | _PROJECTED)
        if not asked:
            continue
        count = min(queries, rows_at_once(work.batch, heads, work.keys)) if some is apart else queries
        if work.selected_heads is not None:
            ledger.phase("select", selected=work.batch * heads * work.queries * work.head_dim * work.itemsize)
        ledger.hold(selected=_picked(work, heads, count))
        masks = masks_of(work)
        if masks.any and count < work.queries:
            masks = _rows_of(masks, count, work.queries)
        stages(ledger, work, Rows(heads, count), masks, asked)
        if not asked & _PROJECTED:
            ledger.drop("selected")
        if some is apart:
            ledger.drop("taps")
            ledger.hold(taps=tap_elements(work, "lse") * softmax_itemsize(work))


def _picked(work: Workload, heads: int, queries: int) -> int:
    """Copies of the selected heads of q, k and v, and of the selected queries."""
    total = 0
    if work.selected_heads is not None:
        total += work.batch * heads * work.keys * (work.head_dim + work.value_dim) * work.itemsize
    if queries < work.queries or work.selected_queries is not None or total:
        total += work.batch * heads * queries * work.head_dim * work.itemsize
    return total


def _comparison(work: Workload) -> Phase:
    """Exact attention beside an approximation, block by block: its context, and two matrices of weights of a block."""
    held = Held.of(work)
    rows = min(work.queries, rows_at_once(work.batch, work.heads, work.keys))
    block = exactly(replace(work, taps=frozenset({"weights"}), selected_heads=None, selected_queries=None))
    masks = masks_of(block)
    if masks.any:
        masks = _rows_of(masks, rows, max(work.queries, 1))
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


def _rows_of(masks: Masks, queries: int, of: int) -> Masks:
    """The masks of some of the queries; a request's own mask is narrowed after it was made."""

    def part(elements: int) -> int:
        return -(-elements * queries // of)

    return Masks(part(masks.spec), masks.bias, masks.together, masks.combined, part(masks.building), masks.several)


def _narrowing(work: Workload) -> int:
    """A tap of the selected heads, before the queries are selected of it."""
    if work.selected_heads is None or work.selected_queries is None or not work.taps & PAIR_TAPS:
        return 0
    return work.batch * work.selected_heads * work.queries * work.keys * score_itemsize(work)


def _selected(work: Workload) -> int:
    """The returned taps, of the selected heads and queries, other than the output."""
    taps = work.taps & (PAIR_TAPS | _PROJECTED | {"context"})
    return sum(tap_elements(work, tap) * _tap_itemsize(work, tap) for tap in taps)


def _tap_itemsize(work: Workload, tap: str) -> int:
    if tap in SCORE_TAPS:
        return score_itemsize(work)
    return softmax_itemsize(work) if tap == "lse" else work.itemsize


def score_tensors(work: Workload) -> int:
    """How many tensors of their own the three kinds of scores are.

    Without a softcap, scores and capped scores are one; without masks and bias, capped and masked scores are.
    """
    return 1 + (work.spec.softcap is not None) + (masks_of(work).any or bias_elements(work) > 0)

"""Peak memory of a forward pass, counted by tensor and phase before any of them is made.

Each phase adds up what is held while it runs; the peak is the largest. The order of phases is that of the computation:
project, put the past before the new keys, mask, score, normalize, weigh the values, project out.
"""

from dataclasses import replace

from attention_service.core.additive import BLOCK
from attention_service.core.blocks import rows_at_once
from attention_service.core.cost.approximate import approximated, exactly, method_peak
from attention_service.core.cost.blocked_memory import blocked_peak, lse_bytes
from attention_service.core.cost.encoding_memory import bias_elements, bias_making
from attention_service.core.cost.fused_memory import fused_context, fused_peak
from attention_service.core.cost.held import Held
from attention_service.core.cost.pairs import (
    Masks,
    fused_masks,
    masks_of,
    normalizer_cost,
    score_cost,
    score_itemsize,
    softmax_itemsize,
)
from attention_service.core.cost.tensors import kv_cache_bytes, tap_elements
from attention_service.core.cost.tiles import counted_as
from attention_service.core.cost.workload import Workload

SCORE_TAPS = frozenset({"scores", "capped_scores", "masked_scores"})
_NORMALIZED = frozenset({"weights", "lse"})
PAIR_TAPS = SCORE_TAPS | _NORMALIZED
"""Taps for which every score of the selected heads and queries is needed."""
_INNER = frozenset({"q", "k", "v"}) | PAIR_TAPS


def peak_bytes(work: Workload, kernel: str) -> int:
    """The most that one forward pass holds at a time on its device, beyond the resident parameters.

    What the libraries below hold for themselves (a cuBLAS workspace, an allocator's rounding) is not in it, nor are
    copies of the reply on the host.
    """
    kernel = counted_as(kernel)
    if approximated(work) is not None:
        peak = with_margin(method_peak(work))
        return max(peak, with_margin(Held.of(work).problem + _comparison(work))) if work.reported else peak
    held = Held.of(work)
    if kernel == "fused":
        context, kept = fused_context(work), _kept(work)
        attention = max(fused_peak(work), context + _again_peak(work))
    elif kernel == "blocked":
        context, kept = held.context, _kept(work)
        left = work if work.taps & (PAIR_TAPS - {"lse"}) else replace(work, taps=frozenset())
        attention = max(blocked_peak(work), context + lse_bytes(work) + _again_peak(left))
    else:
        context, kept = held.context, _kept_whole(work)
        attention = materialized_peak(work, work.queries * work.heads, masks_of(work))
        if work.selected_heads is not None or work.selected_queries is not None:
            attention = max(attention, kept + context + _kept(work) + _narrowing(work))
            kept = _kept(work)
    after = context + held.merged + held.output + kept
    return with_margin(max(held.projecting, held.problem + max(attention, after)))


def _comparison(work: Workload) -> int:
    """Exact attention beside an approximation, block by block: its context, and two matrices of weights of a block."""
    held = Held.of(work)
    rows = min(work.queries, rows_at_once(work.batch, work.heads, work.keys))
    block = exactly(replace(work, taps=frozenset({"weights"}), selected_heads=None, selected_queries=None))
    masks = masks_of(block)
    if masks.any:
        masks = _rows_of(masks, rows, max(work.queries, 1))
    exact = materialized_peak(block, work.heads * rows, masks)
    method, a = approximated(work), max(work.itemsize, 4)
    width = 0 if method is None else method.implied_width(work.head_dim)
    implied = 0
    if width:  # the weights, those implied and two steps on the way, then of one sequence both, their parts and sums
        pairs = work.batch * work.heads * rows * work.keys
        features = 3 * work.batch * work.heads * (work.keys + rows) * width * a
        implied = pairs * (work.itemsize + 3 * a) + 5 * 8 * pairs // max(work.batch, 1) + features
    outputs = 3 * (held.output or held.context) + 2 * held.context
    differences = 3 * 8 * (held.output or held.context) // work.itemsize
    return outputs + max(exact, implied, differences)


def with_margin(counted: int) -> int:
    """A sixteenth more, and a page, for what is too small to count: scalars, indices, flags of rows."""
    return counted + counted // 16 + 4096


def materialized_peak(work: Workload, rows: int, masks: Masks, *, weighed: bool = True) -> int:
    """The stages over ``rows`` queries (times heads) of each sequence, beyond q, k, v: the taps returned among them.

    ``weighed``: on to the weights; otherwise no further than the scores, where those are asked for.

    Scores and softmax over S pairs, in c and n bytes each: a score, its softmax input made finite, the exponentials
    and the weights are held at once, c + 3n (another normalizer says what it holds in place of 3n); softcap and masks
    work on two or three scores at a time.
    """
    c, n = score_itemsize(work), softmax_itemsize(work)
    pairs = work.batch * rows * work.keys
    scores = pairs * c
    capped = work.spec.softcap is not None
    before = (kv_cache_bytes(work) if work.padded else 0) + (2 if work.edited else 0) * scores
    kept = 0
    if not weighed and not work.taps & SCORE_TAPS:
        return before
    peak = copies(work, work.batch * rows) + scores
    if capped:
        peak = max(peak, 3 * scores)
        kept += scores * bool({"scores"} & work.taps)
    if (biased := bias_elements(work, rows)) and (weighed or "masked_scores" in work.taps):
        peak = max(peak, kept + scores + max(bias_making(work, rows, c), biased * c + scores))
        kept += scores * bool(({"capped_scores"} if capped else {"scores", "capped_scores"}) & work.taps)
    if masks.any and (weighed or "masked_scores" in work.taps):
        added = bias_copies(work, masks) + scores if masks.bias else 0
        peak = max(peak, kept + masks.building, kept + 2 * scores + 2 * masks.together + masks.spec + added)
        last = {"capped_scores"} if capped else {"scores", "capped_scores"}
        kept += scores * bool(last & work.taps and not biased)
    if weighed:
        blind = work.batch * rows * (1 + 2 * n)  # which queries look nowhere, and the log-sum-exp
        values = work.value_dim * (work.batch * rows + work.batch * work.kv_heads * work.keys)  # laid out, and the sum
        last_scores = scores if work.taps & _score_groups(work)[-1] else 0
        if work.dropped:  # which are kept, and the numbers drawn for a block of them; then the weights, divided, chosen
            at_once = work.batch * work.heads * work.keys * rows_at_once(work.batch, work.heads, work.keys)
            drawing = pairs * (work.itemsize + 1) + 32 * min(pairs, at_once)
            peak = max(peak, kept + last_scores + max(drawing, pairs * (3 * work.itemsize + 1)))
        peak = max(
            peak,
            kept + scores + pairs * normalizer_cost(work).held + blind,
            kept + last_scores + (pairs + values) * work.itemsize + blind,
        )
    return before + peak


def bias_copies(work: Workload, masks: Masks) -> int:
    """Where the request's mask forbids, and the mask in the dtype of the scores."""
    c = score_itemsize(work)
    return masks.bias * (1 + (c if c != work.itemsize else 0))


def copies(work: Workload, rows: int) -> int:
    """Queries and keys in the dtype of the scores, scaled, and laid out for the product."""
    c, score = score_itemsize(work), score_cost(work)
    queries = rows * work.head_dim
    keys = work.batch * work.kv_heads * work.keys * work.head_dim
    widened = (queries + keys) * c if c != work.itemsize else 0
    laid_out = (queries if work.batch > 1 or work.heads != work.kv_heads else 0) + (keys if work.batch > 1 else 0)
    heads = work.heads if score.by_query_head else work.kv_heads
    made = rows * score.query_width + work.batch * heads * work.keys * score.key_width
    layers = score.layers * min(BLOCK, rows * work.keys * score.layer)
    return (made + layers) * c + widened + laid_out * c


def makes_pairs(work: Workload, kernel: str) -> tuple[bool, bool]:
    """Whether the request holds tensors over all pairs: for each head, and such as heads share."""
    kernel = counted_as(kernel)
    whole = work.selected_queries is None
    if kernel == "blocked":
        return whole and bool(work.taps & (PAIR_TAPS - {"lse"})), False
    by_head = kernel != "fused" or (whole and bool(work.taps & PAIR_TAPS))
    return by_head, (fused_masks(work) if kernel == "fused" else masks_of(work)).any


def _again_peak(work: Workload) -> int:
    """The taps that a fused kernel does not keep, computed again for the selected heads and queries."""
    if not work.taps & _INNER:
        return 0
    heads = work.heads if work.selected_heads is None else work.selected_heads
    queries = work.queries if work.selected_queries is None else work.selected_queries
    if not work.taps & (PAIR_TAPS - {"lse"}):
        queries = min(queries, rows_at_once(work.batch, heads, work.keys))
    narrowed = 0
    if work.selected_heads is not None:
        narrowed += work.batch * heads * work.keys * (work.head_dim + work.value_dim) * work.itemsize
    if narrowed or queries < work.queries:
        narrowed += work.batch * heads * work.queries * work.head_dim * work.itemsize
    masks = masks_of(work)
    if masks.any and queries < work.queries:
        masks = _rows_of(masks, queries, work.queries)
    weighed = bool(work.taps & _NORMALIZED)
    return narrowed + materialized_peak(work, heads * queries, masks, weighed=weighed)


def _rows_of(masks: Masks, queries: int, of: int) -> Masks:
    """The masks of some of the queries; a request's own mask is narrowed after it was made."""

    def part(elements: int) -> int:
        return -(-elements * queries // of)

    return Masks(part(masks.spec), masks.bias, masks.together, masks.combined, part(masks.building))


def _narrowing(work: Workload) -> int:
    """A tap of the selected heads, before the queries are selected of it."""
    if work.selected_heads is None or work.selected_queries is None or not work.taps & PAIR_TAPS:
        return 0
    return work.batch * work.selected_heads * work.queries * work.keys * score_itemsize(work)


def _kept(work: Workload) -> int:
    """The returned taps, of the selected heads and queries, other than the output."""
    return sum(tap_elements(work, tap) * _tap_itemsize(work, tap) for tap in work.taps & (_INNER | {"context"}))


def _kept_whole(work: Workload) -> int:
    """The returned taps before the selection, those that are tensors of their own."""
    pairs = work.pairs * work.heads
    kinds = sum(bool(group & work.taps) for group in _score_groups(work))
    weights = pairs * work.itemsize * ("weights" in work.taps)
    lse = work.batch * work.heads * work.queries * softmax_itemsize(work) * ("lse" in work.taps)
    return kinds * pairs * score_itemsize(work) + weights + lse


def score_tensors(work: Workload) -> int:
    """How many tensors of their own the three kinds of scores are."""
    return len(_score_groups(work))


def _score_groups(work: Workload) -> list[set[str]]:
    """Without a softcap, scores and capped scores are one tensor; without masks, capped and masked scores are."""
    groups = [{"scores"}, {"capped_scores"}, {"masked_scores"}]
    if not masks_of(work).any and not bias_elements(work):
        groups[1] |= groups.pop()
    if work.spec.softcap is None:
        groups[0] |= groups.pop(1)
    return groups


def _tap_itemsize(work: Workload, tap: str) -> int:
    if tap in SCORE_TAPS:
        return score_itemsize(work)
    return softmax_itemsize(work) if tap == "lse" else work.itemsize

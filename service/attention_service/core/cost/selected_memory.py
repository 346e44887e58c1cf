"""Memory of the taps that are returned: computed again beside a kernel that keeps none, and narrowed."""

from attention_service.core.blocks import rows_at_once
from attention_service.core.cost.factors_memory import Rows
from attention_service.core.cost.pairs import Masks, masks_of, score_itemsize, softmax_itemsize
from attention_service.core.cost.phases import Ledger
from attention_service.core.cost.preparing_memory import Apart
from attention_service.core.cost.stages_memory import SCORE_TAPS, stages
from attention_service.core.cost.tensors import tap_elements
from attention_service.core.cost.workload import Workload

_PROJECTED = frozenset({"q", "k", "v"})
PAIR_TAPS = SCORE_TAPS | {"weights", "lse"}
"""Taps for which every score of the selected heads and queries is needed."""
BLOCKED_TAPS = frozenset({"q", "k", "v", "lse", "context"})
"""Those that the blocked kernel has anyway."""


def narrow(ledger: Ledger, work: Workload, taps: frozenset[str], *, whole: str, scattered: bool = False) -> None:
    """Whole taps, held under the name ``whole``, narrowed to the selected heads and queries, which stay as ``taps``.

    ``scattered``: the heads of the context lie side by side in each token.
    """
    selected = 0
    for tap in taps & (PAIR_TAPS | _PROJECTED | {"context"}):
        if kept := _picked(work, tap):
            ledger.phase("select", selected=selected + kept + _picking(work, tap, scattered=scattered))
        selected += kept
    if work.selected_heads is not None or work.selected_queries is not None:
        ledger.drop(whole)
        ledger.hold(taps=selected)


def again(ledger: Ledger, work: Workload, taps: frozenset[str]) -> None:
    """The taps that a kernel does not keep, computed again for the selected heads and queries."""
    heads = work.heads if work.selected_heads is None else work.selected_heads
    queries = work.queries if work.selected_queries is None else work.selected_queries
    apart = taps & {"lse"} if not taps & (PAIR_TAPS - {"lse"}) else frozenset()
    for some in (apart, taps - apart):
        asked = some & (PAIR_TAPS | _PROJECTED)
        if not asked:
            continue
        count = min(queries, rows_at_once(work.batch, heads, work.keys)) if some is apart else queries
        before = ledger.held.get("taps", 0)
        _select(ledger, work, heads, count, both=work.apart > 0 and bool(asked & PAIR_TAPS))
        masks = masks_of(work)
        if masks.any and count < work.queries:
            masks = rows_of(masks, count, work.queries)
        gathered = work.selected_heads is not None
        picked = gathered or work.selected_queries is not None or count < work.queries
        stages(ledger, work, Rows(heads, count, picked, gathered), masks, asked)
        ledger.drop("selected")
        ledger.hold(taps=sum(_picked(work, tap) for tap in asked & _PROJECTED))
        if some is apart:
            ledger.drop("taps")
            ledger.hold(taps=before + tap_elements(work, "lse") * softmax_itemsize(work))


def rows_of(masks: Masks, queries: int, of: int) -> Masks:
    """The masks of some of the queries; a request's own mask is narrowed after it was made."""

    def part(elements: int) -> int:
        return -(-elements * queries // of)

    return Masks(part(masks.spec), masks.bias, masks.together, masks.combined, part(masks.building), masks.several)


def _select(ledger: Ledger, work: Workload, heads: int, queries: int, *, both: bool) -> None:
    """Copies of the selected heads of q, k and v, and of the selected queries, one after the other.

    ``both``: of projections apart as well, whose queries are put among the others.
    """
    some, few = work.selected_heads is not None, queries < work.queries or work.selected_queries is not None
    lying, e = Apart.of(work), work.itemsize
    for picked, lies, times, whole, part, passing in (
        (
            some or few,
            lying.q,
            0 if both else 1,
            work.heads * work.queries * work.head_dim,
            heads * queries * work.head_dim,
            heads * work.queries * work.head_dim if some and few else 0,
        ),
        (
            some,
            lying.k,
            2 if both else 1,
            work.kv_heads * work.keys * work.head_dim,
            heads * work.keys * work.head_dim,
            0,
        ),
        (
            some,
            lying.v,
            2 if both else 1,
            work.kv_heads * work.keys * work.value_dim,
            heads * work.keys * work.value_dim,
            0,
        ),
    ):
        if picked:  # an index wants it row by row
            ledger.phase("select", selected=work.batch * (part + max(passing, whole if lies else 0)) * e)
            ledger.hold(selected=work.batch * part * e * times)


def _picked(work: Workload, tap: str) -> int:
    """Bytes of the selected part of a tap; 0 where all of it is."""
    if work.selected_heads is None and (work.selected_queries is None or tap in {"k", "v"}):
        return 0
    if tap in SCORE_TAPS:
        return tap_elements(work, tap) * score_itemsize(work)
    return tap_elements(work, tap) * (softmax_itemsize(work) if tap == "lse" else work.itemsize)


def _picking(work: Workload, tap: str, *, scattered: bool) -> int:
    """Beside that, while it is picked: the whole laid out row by row, or the selected heads of all queries."""
    lying = Apart.of(work)
    if tap in {"k", "v"}:
        lies, width = (lying.k, work.head_dim) if tap == "k" else (lying.v, work.value_dim)
        return work.batch * work.kv_heads * work.keys * width * work.itemsize if lies else 0
    widths = {"q": work.head_dim, "context": work.value_dim, "lse": 1}
    each = work.batch * work.queries * widths.get(tap, work.keys)
    each *= score_itemsize(work) if tap in SCORE_TAPS | {"lse"} else work.itemsize
    lies = lying.q if tap == "q" else tap == "context" and scattered and work.heads > 1 and work.queries > 1
    both = work.selected_heads is not None and work.selected_queries is not None
    return max(each * work.heads if lies else 0, each * (work.selected_heads or 0) if both else 0)

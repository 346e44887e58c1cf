"""Memory of the stages of the materialized kernel, one after the other; beside other kernels, of the taps again."""

from attention_service.core.blocks import rows_at_once
from attention_service.core.cost.encoding import position_cost
from attention_service.core.cost.factors_memory import Factors, Rows, kv_heads_of
from attention_service.core.cost.pairs import (
    Masks,
    normalizer_cost,
    score_itemsize,
    softmax_itemsize,
)
from attention_service.core.cost.phases import Ledger
from attention_service.core.cost.preparing_memory import Apart
from attention_service.core.cost.workload import Workload
from attention_service.core.positions import POSITIONS

SCORE_TAPS = frozenset({"scores", "capped_scores", "masked_scores"})


def stages(
    ledger: Ledger,
    work: Workload,
    rows: Rows,
    masks: Masks,
    taps: frozenset[str],
) -> None:
    """From q, k and v as far as the taps ask for (``context`` being one of them), which stay as ``taps``."""
    c, scores = score_itemsize(work), rows.pairs(work) * score_itemsize(work)
    weighed = bool(taps & {"lse", "weights", "context"})
    if not weighed and not taps & SCORE_TAPS:
        return
    ledger.hold(padding=_cleaned(work, rows))
    factors = Factors.of(work, rows)
    ledger.phase("scores", factors=factors.held, scores=scores)
    ledger.hold(scores=scores)
    if work.apart:
        _put_apart(ledger, work, rows, scores)
    ledger.phase("edits", edited=scores * beside_edits(work, "scores"))
    if work.spec.softcap is not None:
        ledger.phase("softcap", capping=2 * scores)
        if "scores" in taps:
            ledger.hold(taps=scores)
    last = taps & ({"scores", "capped_scores"} if work.spec.softcap is None else {"capped_scores"})
    ledger.phase("edits", edited=scores * beside_edits(work, "capped_scores"))
    if weighed or "masked_scores" in taps:
        changed = _bias(ledger, work, rows, c)
        if changed and last:
            ledger.hold(taps=scores)
        changed = _hide(ledger, work, masks, scores, kept=bool(last) and not changed) or changed
        last = taps & ({"masked_scores"} if changed else last | {"masked_scores"})
    if work.edits_of("masked_scores"):  # what is forbidden is hidden again
        forbidden = rows.pairs(work)
        ledger.phase("edits", forbidden=forbidden, edited=scores * max(beside_edits(work, "masked_scores"), 2))
        ledger.hold(mask=forbidden)
    if weighed:
        _weigh(ledger, work, rows, taps, kept=bool(last))
    elif last:
        ledger.rename("scores", "taps")
    ledger.drop("scores")
    ledger.drop("padding")


def _cleaned(work: Workload, rows: Rows) -> int:
    """Keys and values without padding, the queries with those that are apart among them, and what is edited of them."""
    padded = padded_bytes(work, rows) if work.padded else 0
    each = work.batch * work.itemsize
    queries = each * rows.heads * rows.queries * work.head_dim
    keys = each * kv_heads_of(work, rows) * work.keys
    edited = {"q": queries, "k": keys * work.head_dim, "v": keys * work.value_dim}
    padded += sum(size for tap, size in edited.items() if work.edits_of(tap))
    return padded + (padded_bytes(work, rows) * work.padded + queries if work.apart else 0)


def bias_elements(work: Workload, rows: Rows | None = None) -> int:
    """Elements of a position's bias for these heads and queries of each sequence; 0 where there is none."""
    if not POSITIONS.of(work.spec.position).biased:
        return 0
    rows = rows or Rows(work.heads, work.queries)
    return (work.batch if work.batched_places else 1) * rows.heads * rows.queries * work.keys


def bias_making(work: Workload, rows: Rows, itemsize: int) -> int:
    """The most that is held while a bias is made, itself included."""
    elements, cost = bias_elements(work, rows), position_cost(work)
    each = elements // max(rows.heads, 1)
    beside = each * (cost.pair_beside + (itemsize if cost.pair_widened else 0))
    return max(each * cost.pair_making, beside + elements * itemsize)


def padded_bytes(work: Workload, rows: Rows | None = None) -> int:
    """Keys and values copied with zeros for padding."""
    heads = work.kv_heads if rows is None else kv_heads_of(work, rows)
    return work.batch * heads * work.keys * (work.head_dim + work.value_dim) * work.itemsize


def _bias(ledger: Ledger, work: Workload, rows: Rows, c: int) -> bool:
    """The bias of a position encoding added; whether there is one."""
    elements = bias_elements(work, rows)
    if not elements:
        return False
    ledger.phase("bias", bias=bias_making(work, rows, c))
    ledger.phase("bias", bias=elements * c, biased=rows.pairs(work) * c)
    return True


def visible(ledger: Ledger, masks: Masks) -> int:
    """What the masks allow is found; its bytes."""
    laid_out = masks.spec if masks.building else 0
    ledger.phase("mask", mask=max(masks.building, laid_out + (masks.together if masks.several else 0)))
    return masks.together if masks.several else laid_out


def _hide(ledger: Ledger, work: Workload, masks: Masks, scores: int, *, kept: bool) -> bool:
    """What is forbidden hidden; whether there is a mask. ``kept``: the scores before stay, as a tap."""
    if not masks.any:
        return False
    seen = visible(ledger, masks)
    forbidden = masks.together
    if masks.bias:
        widened = masks.bias * score_itemsize(work) if score_itemsize(work) != work.itemsize else 0
        ledger.phase("mask", mask=seen + masks.bias + widened, masked=scores)
    ledger.phase("mask", mask=seen + forbidden, masked=scores)
    if kept:
        ledger.hold(taps=scores)
    return True


def _weigh(ledger: Ledger, work: Workload, rows: Rows, taps: frozenset[str], *, kept: bool) -> None:
    """The masked scores normalized, and the values weighed."""
    e, n, pairs = work.itemsize, softmax_itemsize(work), rows.pairs(work)
    queries = work.batch * rows.heads * rows.queries
    cost = normalizer_cost(work)
    if "lse" in taps:
        ledger.phase("lse", normalizing=2 * pairs * n)
        ledger.hold(taps=queries * n)
    ledger.phase("weights", normalizing=pairs * cost.held)
    if e != n:
        ledger.phase("weights", normalizing=pairs * n, weights=pairs * e)
    if kept:
        ledger.hold(taps=ledger.held.get("scores", 0))
    ledger.drop("scores")
    ledger.hold(weights=pairs * e)
    if not taps & {"weights", "context"}:
        ledger.drop("weights")
        return
    if "weights" in taps:
        ledger.hold(taps=pairs * e)
        ledger.drop("weights")
    if "context" not in taps:
        return
    ledger.phase("edits", edited=pairs * e * beside_edits(work, "weights"))
    if work.dropped:
        _drop(ledger, work, rows)
    laid = Apart.of(work).v and work.batch > 1 and not rows.gathered
    values = work.batch * kv_heads_of(work, rows) * work.keys * work.value_dim * e if laid else 0
    ledger.phase("context", values=values, context=queries * work.value_dim * e)
    ledger.drop("weights")
    ledger.phase("edits", context=queries * work.value_dim * e * (1 + beside_edits(work, "context")))
    ledger.hold(context=queries * work.value_dim * e)
    if work.apart:
        ledger.phase("queries apart", context=queries * work.value_dim * e)


_BESIDE = {"set": 1, "value": 2, "scale": 2, "renormalize": 3}


def beside_edits(work: Workload, tap: str) -> int:
    """Tensors as large as a tap that are held beside it while it is edited."""
    edits = work.edits_of(tap)
    return max((_BESIDE[does] for does in edits), default=0) + (len(edits) > 1)


def _put_apart(ledger: Ledger, work: Workload, rows: Rows, scores: int) -> None:
    """The scores of queries that are apart, put among the others: a copy of all."""
    few = Rows(rows.heads, min(work.apart, rows.queries))
    factors = Factors.of(work, few)
    ledger.phase("queries apart", factors=factors.held, apart=few.pairs(work) * score_itemsize(work))
    ledger.phase("queries apart", scores=scores)


def _drop(ledger: Ledger, work: Workload, rows: Rows) -> None:
    """Which weights are kept, drawn for a block of queries at a time; and those weights, divided."""
    e, pairs = work.itemsize, rows.pairs(work)
    at_once = work.batch * rows.heads * work.keys * rows_at_once(work.batch, rows.heads, work.keys)
    drawn = min(pairs, at_once)  # three int64 at a time, beside what is known of the blocks before
    ledger.phase("dropout", drawing=24 * drawn + drawn * max(pairs // max(drawn, 1) - 1, 0))
    ledger.phase("dropout", drawing=2 * pairs)
    ledger.phase("dropout", drawing=pairs, dropped=2 * pairs * e)

"""Memory of the stages of the materialized kernel, one after the other; beside other kernels, of the taps again."""

from dataclasses import dataclass

from attention_service.core.additive import BLOCK
from attention_service.core.blocks import rows_at_once
from attention_service.core.cost.encoding import position_cost
from attention_service.core.cost.pairs import (
    Masks,
    normalizer_cost,
    score_cost,
    score_itemsize,
    softmax_itemsize,
)
from attention_service.core.cost.phases import Ledger
from attention_service.core.cost.preparing_memory import Apart
from attention_service.core.cost.workload import Workload
from attention_service.core.positions import POSITIONS

SCORE_TAPS = frozenset({"scores", "capped_scores", "masked_scores"})


@dataclass(frozen=True)
class Rows:
    """The heads and queries of each sequence for which the stages are gone through."""

    heads: int
    queries: int

    def pairs(self, work: Workload) -> int:
        """Over the batch."""
        return work.batch * self.heads * self.queries * work.keys


@dataclass(frozen=True)
class Factors:
    """Bytes of what the scores are a product of."""

    wide: int
    """Queries and keys in the dtype of the scores, where that is another."""
    query: int
    """Made of the queries by the score, and scaled."""
    scaling: int
    """While they are scaled: as they were before."""
    key: int
    laid_query: int
    """Copied, so that a head lies behind the other."""
    laid_key: int
    layers: int
    """Of a hidden layer for each pair."""

    @classmethod
    def of(cls, work: Workload, rows: Rows) -> "Factors":
        """As the materialized kernel makes them."""
        c, score, lying = score_itemsize(work), score_cost(work), Apart.of(work)
        grouped = rows.heads != _kv_heads(work, rows)
        queries = work.batch * rows.heads * rows.queries
        keys = work.batch * _kv_heads(work, rows) * work.keys
        wide = (queries + keys) * work.head_dim * c if c != work.itemsize else 0
        width = score.query_width or work.head_dim
        made = queries * score.query_width * c
        scaled = queries * width * c if score.scaled else 0
        laid = lying.q and (work.batch > 1 or grouped) and not score.query_width
        by_head = work.batch * rows.heads * work.keys if score.by_query_head else keys
        pairs = rows.pairs(work) * score.layer
        layers = (score.layers if pairs > BLOCK else score.layers - 1) * min(BLOCK, pairs) if score.layer else 0
        return cls(
            wide=wide,
            query=scaled or made,
            scaling=made if scaled else 0,
            key=by_head * score.key_width * c,
            laid_query=queries * width * c if laid else 0,
            laid_key=keys * work.head_dim * c if lying.k and work.batch > 1 and not score.key_width else 0,
            layers=layers * c,
        )

    @property
    def held(self) -> int:
        """While the pairs are scored."""
        return self.wide + self.query + self.scaling + self.key + self.laid_query + self.laid_key + self.layers


def stages(
    ledger: Ledger,
    work: Workload,
    rows: Rows,
    masks: Masks,
    taps: frozenset[str],
    *,
    graph: bool = False,
) -> None:
    """From q, k and v as far as the taps ask for (``context`` being one of them), which stay as ``taps``.

    ``graph``: what autograd keeps stays as well.
    """
    c, scores = score_itemsize(work), rows.pairs(work) * score_itemsize(work)
    weighed = bool(taps & {"lse", "weights", "context"})
    if not weighed and not taps & SCORE_TAPS:
        return
    if work.padded:
        ledger.hold(padding=padded_bytes(work, rows))
    factors = Factors.of(work, rows)
    ledger.phase("scores", factors=factors.held, scores=scores)
    if graph:
        ledger.hold(graph=kept_factors(work, rows, factors))
    ledger.hold(scores=scores)
    edited = scores if work.edited else 0
    ledger.phase("edits", edited=2 * edited)
    if work.spec.softcap is not None:
        ledger.phase("softcap", capping=2 * scores)
        if graph:
            ledger.hold(capped=scores)
        if "scores" in taps:
            ledger.hold(taps=scores)
    last = taps & ({"scores", "capped_scores"} if work.spec.softcap is None else {"capped_scores"})
    if weighed or "masked_scores" in taps:
        changed = _bias(ledger, work, rows, c, graph=graph)
        if changed and last:
            ledger.hold(taps=scores)
        changed = _hide(ledger, work, masks, scores, kept=bool(last) and not changed, graph=graph) or changed
        last = taps & ({"masked_scores"} if changed else last | {"masked_scores"})
    if weighed:
        _weigh(ledger, work, rows, taps, kept=bool(last), graph=graph)
    elif last:
        ledger.rename("scores", "taps")
    ledger.drop("scores")
    ledger.drop("padding")


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
    heads = work.kv_heads if rows is None else _kv_heads(work, rows)
    return work.batch * heads * work.keys * (work.head_dim + work.value_dim) * work.itemsize


def made_factors(work: Workload, rows: Rows, factors: Factors) -> int:
    """What autograd keeps of the factors beside q, k and v in the dtype of the scores."""
    score, e = score_cost(work), score_itemsize(work)
    kept = (
        work.batch * rows.heads * rows.queries * score.query_kept
        + work.batch * work.kv_heads * work.keys * score.key_kept
    )
    if score.query_products and Apart.of(work).q and work.batch > 1:  # laid out for the product with what is learned
        kept += work.batch * rows.heads * rows.queries * work.head_dim
    return kept * e + (factors.query or factors.laid_query) + (factors.key or factors.laid_key)


def kept_factors(work: Workload, rows: Rows, factors: Factors) -> int:
    """What autograd keeps of the factors, beside q, k and v themselves, and of the keys without padding."""
    c, score = score_itemsize(work), score_cost(work)
    queries = work.batch * rows.heads * rows.queries * work.head_dim
    keys = work.batch * work.kv_heads * work.keys * work.head_dim
    wide = c if c != work.itemsize else 0
    kept = made_factors(work, rows, factors)
    if score.query_width * score.reads or not (factors.query or factors.laid_query):
        kept += queries * wide
    if score.key_width * score.reads or not (factors.key or factors.laid_key):
        kept += keys * wide
    if work.padded and not (factors.laid_key or wide):
        kept += keys * work.itemsize
    return kept


def _kv_heads(work: Workload, rows: Rows) -> int:
    """Of selected heads, each reads a copy of its own."""
    return work.kv_heads if rows.heads == work.heads and work.selected_heads is None else rows.heads


def _bias(ledger: Ledger, work: Workload, rows: Rows, c: int, *, graph: bool) -> bool:
    """The bias of a position encoding added; whether there is one."""
    elements = bias_elements(work, rows)
    if not elements:
        return False
    ledger.phase("bias", bias=bias_making(work, rows, c))
    ledger.phase("bias", bias=elements * c, biased=rows.pairs(work) * c)
    if graph:
        ledger.hold(graph=elements // max(rows.heads, 1) * position_cost(work).pair_kept)
    return True


def visible(ledger: Ledger, masks: Masks) -> int:
    """What the masks allow is found; its bytes."""
    laid_out = masks.spec if masks.building else 0
    ledger.phase("mask", mask=max(masks.building, laid_out + (masks.together if masks.several else 0)))
    return masks.together if masks.several else laid_out


def _hide(ledger: Ledger, work: Workload, masks: Masks, scores: int, *, kept: bool, graph: bool) -> bool:
    """What is forbidden hidden; whether there is a mask. ``kept``: the scores before stay, as a tap."""
    if not masks.any:
        return False
    seen = visible(ledger, masks)
    forbidden = masks.together
    if masks.bias:
        widened = masks.bias * score_itemsize(work) if score_itemsize(work) != work.itemsize else 0
        ledger.phase("mask", mask=seen + masks.bias + widened, masked=scores)
        forbidden += masks.bias if graph else 0
    ledger.phase("mask", mask=seen + forbidden, masked=scores)
    if kept:
        ledger.hold(taps=scores)
    if graph:
        ledger.hold(mask=forbidden)
    return True


def _weigh(ledger: Ledger, work: Workload, rows: Rows, taps: frozenset[str], *, kept: bool, graph: bool) -> None:
    """The masked scores normalized, and the values weighed."""
    e, n, pairs = work.itemsize, softmax_itemsize(work), rows.pairs(work)
    queries = work.batch * rows.heads * rows.queries
    cost = normalizer_cost(work)
    if "lse" in taps:
        ledger.phase("lse", normalizing=2 * pairs * n)
        ledger.hold(taps=queries * n)
    ledger.phase("weights", normalizing=pairs * cost.held)
    if e != n:
        kept_of_it = pairs * n if cost.apart and graph else 0
        ledger.phase("weights", normalizing=pairs * n + kept_of_it, weights=pairs * e)
    if kept:
        ledger.hold(taps=ledger.held.get("scores", 0))
    ledger.drop("scores")
    if graph and (cost.apart or e != n):
        ledger.hold(normalized=pairs * n)
    ledger.hold(weights=pairs * e)
    if not taps & {"weights", "context"}:
        ledger.drop("weights")
        return
    if "weights" in taps:
        ledger.hold(taps=pairs * e)
        ledger.drop("weights")
    if "context" not in taps:
        return
    ledger.phase("edits", edited=2 * pairs * e * work.edited)
    if work.dropped:
        _drop(ledger, work, rows, graph=graph)
    laid = Apart.of(work).v and work.batch > 1
    values = work.batch * _kv_heads(work, rows) * work.keys * work.value_dim * e if laid else 0
    ledger.phase("context", values=values, context=queries * work.value_dim * e)
    if graph:
        without = work.batch * work.kv_heads * work.keys * work.value_dim * e if work.padded and not values else 0
        ledger.hold(values=values + without)
    else:
        ledger.drop("weights")
    ledger.hold(context=queries * work.value_dim * e)


def _drop(ledger: Ledger, work: Workload, rows: Rows, *, graph: bool) -> None:
    """Which weights are kept, drawn for a block of queries at a time; and those weights, divided."""
    e, pairs = work.itemsize, rows.pairs(work)
    at_once = work.batch * rows.heads * work.keys * rows_at_once(work.batch, rows.heads, work.keys)
    ledger.phase("dropout", drawing=pairs + 24 * min(pairs, at_once))
    ledger.phase("dropout", drawing=2 * pairs)
    ledger.phase("dropout", drawing=pairs, dropped=2 * pairs * e)
    if graph:
        ledger.hold(dropout=pairs)

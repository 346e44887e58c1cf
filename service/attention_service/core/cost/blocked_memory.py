"""Memory of the blocked kernel: its results, and one tile of scores at a time."""

from dataclasses import dataclass, replace

from attention_service.core.additive import BLOCK
from attention_service.core.cost.encoding import position_cost
from attention_service.core.cost.held import Held
from attention_service.core.cost.pairs import normalizer_cost, score_cost, score_itemsize
from attention_service.core.cost.phases import Ledger
from attention_service.core.cost.preparing_memory import Apart
from attention_service.core.cost.stages_memory import Factors, Rows, bias_elements, bias_making, made_factors
from attention_service.core.cost.tiles import sequences, tiling_of, touched, whole_rows
from attention_service.core.cost.workload import Workload
from attention_service.core.kernels.hiding import KEPT
from attention_service.core.masks import pattern_of
from attention_service.core.normalizers import has_lse
from attention_service.core.patterns import Band, Pattern


@dataclass(frozen=True)
class Tile:
    """The largest tile of a workload."""

    sequences: int
    queries: int
    keys: int
    scores: int
    """Over all sequences and heads of it."""

    @classmethod
    def of(cls, work: Workload) -> "Tile":
        """As the kernel cuts it."""
        fitted, widest = tiling_of(work), touched(work).widest
        together = sequences(work, fitted)
        queries = min(fitted.queries, work.queries)
        if whole_rows(work):
            keys = widest
            queries = min(queries, max(1, fitted.scores // max(1, widest)))
        else:
            keys = min(fitted.keys, widest)
        return cls(together, queries, keys, together * work.heads * queries * keys)


def blocked(ledger: Ledger, work: Workload, *, graph: bool = False) -> None:
    """From q, k and v to the context and, of a softmax, the log-sum-exp, which stay."""
    ledger.hold(context=Held.of(work).context, lse=lse_bytes(work))
    held = dict(ledger.held)
    _forward_tile(ledger, work)
    ledger.held = held
    if not graph and "lse" not in work.taps:
        ledger.drop("lse")


def lse_bytes(work: Workload) -> int:
    """The logarithms of the sums, which only a softmax has."""
    return work.batch * work.heads * work.queries * score_itemsize(work) if _streamed(work) else 0


def _streamed(work: Workload) -> bool:
    return has_lse(work.spec.normalizer)


def _forward_tile(ledger: Ledger, work: Workload) -> None:
    """While a tile is scored, hidden, normalized and weighs the values."""
    c, tile = score_itemsize(work), Tile.of(work)
    one = replace(work, batch=tile.sequences, queries=tile.queries, keys=tile.keys)
    rows, scores = Rows(work.heads, tile.queries), tile.scores * c
    context = tile.sequences * work.heads * tile.queries * work.value_dim * c
    if not _streamed(work) or touched(work).strips > touched(work).blocks:
        ledger.hold(block=context)
    leaves, laid_values = _leaves(ledger, work, tile)
    ledger.hold(tile=leaves, limits=limits_of(work, tile))
    score_tile(ledger, work, one, rows, scores)
    ledger.hold(scores=scores)
    if work.spec.masks:
        ledger.phase("mask", mask=tile.queries * tile.keys * max(1, _pattern(work).building))
    if work.dropped:
        ledger.phase("dropout", drawing=24 * tile.scores)
        ledger.phase("dropout", drawing=tile.scores, dropped=2 * scores)
    if _streamed(work):
        ledger.phase("context", values=laid_values, block=context, dropped=scores if work.dropped else 0)
    else:
        cost = normalizer_cost(work)
        ledger.phase("weights", normalizing=tile.scores * cost.held)
        ledger.phase("context", weights=scores, values=laid_values, block=context)


def score_tile(ledger: Ledger, work: Workload, one: Workload, rows: Rows, scores: int) -> None:
    """The scores of a tile, what is added to them included."""
    c = score_itemsize(work)
    factors = Factors.of(one, rows)
    ledger.phase("scores", factors=factors.held - factors.wide, scores=scores)
    if work.spec.softcap is not None:
        ledger.phase("softcap", capping=3 * scores)
    if biased := bias_elements(one, rows):
        ledger.phase("bias", scores=scores, bias=bias_making(one, rows, c))
        ledger.phase("bias", scores=scores, bias=biased * c, biased=scores)
    if work.request_mask_elements and not work.bool_mask:
        told = _told(work, one)
        widened = told * c if c != work.itemsize else 0
        ledger.phase("mask", mask=told * (1 + work.itemsize), scores=scores)
        ledger.phase("mask", mask=told * work.itemsize + widened, scores=2 * scores)


def _told(work: Workload, one: Workload) -> int:
    """Elements of the request's mask that meet in a tile."""
    return -(-work.request_mask_elements * one.queries * one.keys // max(1, work.queries * work.keys))


def _leaves(ledger: Ledger, work: Workload, tile: Tile) -> tuple[int, int]:
    """Copies of what meets in a tile, and of the values as they are laid out for their product."""
    c, e = score_itemsize(work), work.itemsize
    queries = tile.sequences * work.heads * tile.queries * work.head_dim
    keys = tile.sequences * work.kv_heads * tile.keys * (work.head_dim + work.value_dim)
    gathered = keys * e if tile.keys < work.keys and _gathers(work) else 0
    if work.padded:
        ledger.phase("tile", gathered=gathered, tile=keys * e)
    if c != e:
        ledger.phase("tile", gathered=keys * e if work.padded else gathered, tile=(queries + keys) * c)
    laid = not gathered and Apart.of(work).v and tile.sequences > 1
    values = tile.sequences * work.kv_heads * tile.keys * work.value_dim * c if laid else 0
    return ((queries + keys) * c if c != e else keys * e if work.padded or gathered else 0), values


def _gathers(work: Workload) -> bool:
    """Whether the keys of a tile may lie apart."""
    return bool(work.spec.masks) and bool(_pattern(work).bounds.strips)


def _pattern(work: Workload) -> Pattern:
    return pattern_of(work.spec.masks, work.queries, work.told_keys, work.past)


def limits_of(work: Workload, tile: Tile) -> int:
    """What positions hide in some tiles, which is remembered."""
    if not work.spec.masks:
        return 0
    c, whole = score_itemsize(work), tile.queries * tile.keys
    # Along each edge a piece as wide as the block and a cell more; those of one edge all look the same.
    piece = min(whole, tile.queries * (tile.queries + tiling_of(work).cell))
    bands = [part for part in _pattern(work).parts() if isinstance(part, Band)]
    edges = sum((band.low is not None) + (band.high is not None) for band in bands)
    kinds = max(edges, 1) * (work.batch if work.batched_offsets else 1)
    fitted = tiling_of(work)
    return min(KEPT * fitted.largest, kinds * piece) * c


def backward_tile(ledger: Ledger, work: Workload, *, mask: bool) -> None:
    """While a tile is gone through again.

    Its scores are there with the graph that made them, once more to become weights, and with the gradient of the
    weights, which becomes theirs.
    """
    c, tile = score_itemsize(work), Tile.of(work)
    one = replace(work, batch=tile.sequences, queries=tile.queries, keys=tile.keys)
    rows, scores = Rows(work.heads, tile.queries), tile.scores * c
    held = dict(ledger.held)
    leaves, _ = _leaves(ledger, work, tile)
    factors = Factors.of(one, rows)
    queries = tile.sequences * work.heads * tile.queries
    keys = tile.sequences * work.kv_heads * tile.keys
    ledger.hold(tile=leaves, limits=limits_of(work, tile))
    score_tile(ledger, work, one, rows, scores)
    upstream = queries * work.value_dim * c if c != work.itemsize else 0
    ledger.hold(factors=made_factors(one, rows, factors), scores=scores, flowing=upstream)
    if work.spec.softcap is not None:
        ledger.hold(capped=scores)
    if biased := bias_elements(one, rows):
        ledger.hold(biases=biased // work.heads * position_cost(work).pair_kept)
    if work.request_mask_elements and not work.bool_mask:
        ledger.hold(biases=_told(work, one))
    of_v = keys * work.value_dim * c
    if work.dropped:
        ledger.phase("dropout", weights=scores, of_weights=scores, drawing=24 * tile.scores)
    dropped = tile.scores + 2 * scores if work.dropped else 0
    if _streamed(work):
        ledger.phase("backward of attention", weights=scores, of_weights=scores, dropped=dropped, of_values=of_v)
    else:
        cost = normalizer_cost(work)
        ledger.phase("backward of attention", weights=scores + tile.scores * cost.held)
        back = tile.scores * cost.held_backward
        ledger.phase("backward of attention", weights=scores + back, of_values=of_v, dropped=dropped)
    # The weights are freed with the function that found them; the hidden scores that they were stay.
    flowing = 2 * scores
    of_q, of_k = queries * work.head_dim * c, factors.key or keys * work.head_dim * c
    if work.spec.softcap is not None:
        ledger.phase("backward of attention", flowing=flowing + 2 * scores, of_values=of_v)
    if biased and biased < tile.scores:  # summed over the batch
        ledger.phase("backward of attention", flowing=flowing, of_values=of_v, of_bias=biased * c)
    ledger.drop("biases")
    of_mask = _told(work, one) * c if mask else 0
    layers = score_cost(work).backward_layers * min(BLOCK, tile.scores * score_cost(work).layer) * c
    gradients = of_q + of_k + of_mask
    ledger.phase("backward of attention", flowing=flowing, of_values=of_v, gradients=gradients, layers=layers)
    if back := score_cost(work).key_back:  # and through what the factors were made of
        ledger.lessen("factors", factors.query + factors.key)
        ledger.phase("backward of attention", flowing=flowing, of_values=of_v, gradients=gradients + back * of_k)
    ledger.held = held

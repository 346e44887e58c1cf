"""Peak memory of the blocked kernel: its results, and one tile of scores at a time."""

from dataclasses import dataclass, replace

from attention_service.core.additive import BLOCK
from attention_service.core.cost.encoding import position_cost
from attention_service.core.cost.encoding_memory import bias_elements, bias_making
from attention_service.core.cost.held import Held
from attention_service.core.cost.pairs import masks_of, normalizer_cost, score_cost, score_itemsize
from attention_service.core.cost.tiles import sequences, tiling_of, touched, whole_rows
from attention_service.core.cost.workload import Workload
from attention_service.core.kernels.hiding import KEPT
from attention_service.core.masks import pattern_of
from attention_service.core.normalizers import NORMALIZERS, Exponential


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


def blocked_peak(work: Workload) -> int:
    """One call, beyond q, k and v: the context and the log-sum-exp, and the largest tile."""
    return Held.of(work).context + lse_bytes(work) + forward_tile(work)


def lse_bytes(work: Workload) -> int:
    """The logarithms of the sums, which only a softmax has."""
    streamed = isinstance(NORMALIZERS.of(work.spec.normalizer), Exponential)
    return work.batch * work.heads * work.queries * score_itemsize(work) if streamed else 0


def forward_tile(work: Workload) -> int:
    """While a tile is scored, hidden, normalized and weighs the values.

    Scores are there once; three times while they are capped, twice while a mask is added; then with what the normalizer
    holds beside them, unless it is a softmax, which works in place.
    """
    c, tile = score_itemsize(work), Tile.of(work)
    scores = tile.scores * c
    peak = scores * (3 if work.spec.softcap is not None else 2 if _biased(work) else 1)
    one = _of_tile(work, tile)
    if biased := bias_elements(one):
        peak = max(peak, scores + max(bias_making(one, one.heads * one.queries, c), biased * c + scores))
    if not isinstance(NORMALIZERS.of(work.spec.normalizer), Exponential):
        peak = max(peak, scores + tile.scores * normalizer_cost(work).held)
    if work.dropped:  # the numbers drawn, which are kept, and the weights without the others
        peak = max(peak, 2 * scores + 25 * tile.scores)
    return _parts(work, tile, score_cost(work).layers) + _masks(work, tile) + peak


def backward_tile(work: Workload) -> int:
    """While a tile is gone through again.

    Its scores are there with the graph that made them, once more to become weights, and with the gradient of the
    weights, which becomes theirs.
    """
    c, tile = score_itemsize(work), Tile.of(work)
    scores = tile.scores * c
    capped = work.spec.softcap is not None
    flowing = 3 * scores
    if not isinstance(NORMALIZERS.of(work.spec.normalizer), Exponential):
        flowing = 2 * scores + tile.scores * normalizer_cost(work).held_backward
    if work.dropped:
        flowing += scores + 25 * tile.scores
    if capped:
        flowing += 2 * scores
    flowing += bias_elements(_of_tile(work, tile)) // work.heads * position_cost(work).pair_kept
    return (
        _parts(work, tile, score_cost(work).backward_layers)
        + _gradients_of_parts(work, tile)
        + _masks(work, tile)
        + flowing
    )


def _of_tile(work: Workload, tile: Tile) -> Workload:
    """A tile as if it were the whole."""
    return replace(work, batch=tile.sequences, queries=tile.queries, keys=tile.keys)


def _biased(work: Workload) -> bool:
    return masks_of(work).bias > 0


def _parts(work: Workload, tile: Tile, layers: int) -> int:
    """Copies of what meets in a tile, and its part of the context; a module's values are laid out anew."""
    c, score = score_itemsize(work), score_cost(work)
    queries = tile.sequences * work.heads * tile.queries
    keys = tile.sequences * work.kv_heads * tile.keys
    copies = int(c != work.itemsize) + int(work.padded)
    made = queries * (max(score.query_width, work.head_dim) + (1 if work.sizes is None else 2) * work.value_dim)
    heads = work.heads if score.by_query_head else work.kv_heads
    made += tile.sequences * heads * tile.keys * score.key_width
    made += layers * min(BLOCK, tile.scores * score.layer)
    return c * (made + copies * keys * (work.head_dim + work.value_dim))


def _gradients_of_parts(work: Workload, tile: Tile) -> int:
    c = score_itemsize(work)
    queries = tile.sequences * work.heads * tile.queries
    keys = tile.sequences * work.kv_heads * tile.keys
    return c * (queries * (work.head_dim + work.value_dim) + keys * (work.head_dim + work.value_dim))


def _masks(work: Workload, tile: Tile) -> int:
    """What positions hide in some tiles, which is remembered, and the tile's part of the request's mask."""
    c, one = score_itemsize(work), tile.queries * tile.keys
    total = 0
    if work.spec.masks:
        building = pattern_of(work.spec.masks, work.queries, work.told_keys, work.past).building
        total += one * (KEPT * c + building)
    masks = masks_of(work)
    if work.request_mask_elements:
        share = -(-work.request_mask_elements * one // max(1, work.queries * work.keys))
        total += share * (1 + (0 if work.bool_mask else c + work.itemsize))
    return total + (tile.sequences * tile.keys if masks.any else 0)

"""Memory of the blocked kernel: its results, and one tile of scores at a time."""

from dataclasses import dataclass, replace

from attention_service.core.additive import BLOCK
from attention_service.core.cost.blocked_tiles import Tile, largest_tiles
from attention_service.core.cost.encoding import position_cost
from attention_service.core.cost.factors_memory import Factors, Rows, made_factors
from attention_service.core.cost.held import Held
from attention_service.core.cost.pairs import normalizer_cost, request_mask, score_cost, score_itemsize
from attention_service.core.cost.phases import Ledger
from attention_service.core.cost.preparing_memory import Apart
from attention_service.core.cost.stages_memory import bias_elements, bias_making
from attention_service.core.cost.workload import Workload
from attention_service.core.masks import pattern_of
from attention_service.core.normalizers import has_lse
from attention_service.core.patterns import Pattern, making


@dataclass(frozen=True)
class _Here:
    """One tile of a workload, and its sizes."""

    work: Workload
    tile: Tile
    one: Workload
    """An attention as large as the tile."""
    itemsize: int
    """Bytes of a score."""

    @classmethod
    def all_of(cls, work: Workload) -> "list[_Here]":
        """Each that may be the largest."""
        together, tiles = largest_tiles(work)
        return [
            cls(work, tile, replace(work, batch=together, queries=tile.queries, keys=tile.keys), score_itemsize(work))
            for tile in tiles
        ]

    @property
    def rows(self) -> Rows:
        """All heads, and the queries of the tile."""
        return Rows(self.work.heads, self.tile.queries)

    @property
    def pairs(self) -> int:
        """Over all sequences and heads."""
        return self.one.pairs * self.work.heads

    @property
    def scores(self) -> int:
        """Bytes."""
        return self.pairs * self.itemsize

    @property
    def told(self) -> int:
        """Elements of the request's mask that meet in the tile."""
        work = self.work
        if not work.request_mask_elements:
            return 0
        batch, heads, queries = request_mask(work)
        batch, queries = min(batch, self.one.batch), min(queries, self.tile.queries)
        return batch * heads * queries * self.tile.keys

    def limits(self, pairs: int) -> int:
        """Bytes of what positions hide; a number for each key or query is too small to count."""
        return pairs * self.itemsize if _pattern(self.work).laid_out else 0


def blocked(ledger: Ledger, work: Workload) -> None:
    """From q, k and v to the context and, where it is returned, the log-sum-exp of a softmax, which stay."""
    ledger.hold(context=Held.of(work).context, lse=_lse_bytes(work))
    forward_tile(ledger, work)
    if "lse" not in work.taps:
        ledger.drop("lse")


def forward_tile(ledger: Ledger, work: Workload) -> None:
    """While a tile is gone through."""
    held = dict(ledger.held)
    for here in _Here.all_of(work):
        _forward_tile(ledger, here)
        ledger.held = dict(held)


def _lse_bytes(work: Workload) -> int:
    """The logarithms of the sums, which only a softmax has."""
    return work.batch * work.heads * work.queries * score_itemsize(work) if _streamed(work) else 0


def _pattern(work: Workload) -> Pattern:
    return pattern_of(work.spec.masks, work.queries, work.told_keys, work.past)


def _streamed(work: Workload) -> bool:
    return has_lse(work.spec.normalizer)


def _forward_tile(ledger: Ledger, here: _Here) -> None:
    """While a tile is scored, hidden, normalized and weighs the values."""
    work, tile, c, scores = here.work, here.tile, here.itemsize, here.scores
    context = here.one.batch * work.heads * tile.queries * work.value_dim * max(c, 4)
    if not _streamed(work) or tile.follows:
        ledger.hold(block=context)
    leaves, laid_values = _leaves(ledger, here)
    ledger.hold(tile=leaves, limits=here.limits(tile.remembered))
    score_tile(ledger, here)
    ledger.hold(scores=scores)
    _hide_tile(ledger, here)
    if _streamed(work):
        dropped = _drop_tile(ledger, here)
        ledger.phase("context", values=laid_values, block=context, dropped=dropped)
    else:
        ledger.phase("weights", normalizing=here.pairs * normalizer_cost(work).held)
        ledger.hold(weights=scores)
        dropped = _drop_tile(ledger, here)
        ledger.phase("context", values=laid_values, block=context, dropped=dropped)


def _drop_tile(ledger: Ledger, here: _Here) -> int:
    """Which weights of a tile are kept, drawn as int64 three at a time, and those divided; bytes of what stays."""
    if not here.work.dropped:
        return 0
    ledger.phase("dropout", drawing=24 * here.pairs)
    ledger.phase("dropout", drawing=here.pairs, dropped=2 * here.scores)
    return here.scores


def _hide_tile(ledger: Ledger, here: _Here) -> None:
    """The limits of positions laid out and remembered, and what padding and the request's mask hide found."""
    work, tile = here.work, here.tile
    if work.spec.masks:
        ledger.hold(limits=here.limits(tile.limits - tile.remembered))
        pattern = _pattern(work)
        laid_out = max(tile.fresh * pattern.laid_out, making(pattern, tile.fresh, tile.queries))
        ledger.phase("mask", mask=laid_out + here.limits(tile.passing))
    if work.request_mask_elements:  # put together of several stretches, and turned round
        ledger.phase("mask", mask=here.told * (1 + (tile.spans > 1)) if work.bool_mask else here.told)


def score_tile(ledger: Ledger, here: _Here) -> None:
    """The scores of a tile, what is added to them included."""
    work, c, scores, several = here.work, here.itemsize, here.scores, here.tile.spans > 1
    factors = Factors.of(here.one, here.rows)
    ledger.phase("scores", factors=factors.held - factors.standing, scores=scores)
    if work.spec.softcap is not None:
        ledger.phase("softcap", capping=3 * scores)
    if biased := bias_elements(here.one, here.rows):
        ledger.phase("bias", scores=scores, bias=bias_making(here.one, here.rows, c) + several * biased * c)
        ledger.phase("bias", scores=scores, bias=(1 + several) * biased * c, biased=scores)
    if here.told and not work.bool_mask:
        parts = here.told * work.itemsize if several else 0
        widened = here.told * c if c != work.itemsize else 0
        ledger.phase("mask", mask=parts + here.told * (1 + work.itemsize), scores=scores)
        ledger.phase("mask", mask=parts + here.told * work.itemsize + widened, scores=2 * scores)


def _leaves(ledger: Ledger, here: _Here) -> tuple[int, int]:
    """Copies of what meets in a tile, and of the values as they are laid out for their product."""
    work, tile, c, e = here.work, here.tile, here.itemsize, here.work.itemsize
    queries = here.one.batch * work.heads * tile.queries * work.head_dim
    keys = here.one.batch * work.kv_heads * tile.keys * (work.head_dim + work.value_dim)
    gathered = keys * e if tile.spans > 1 else 0
    if work.padded:
        ledger.phase("tile", gathered=gathered, tile=keys * e)
    if c != e:
        ledger.phase("tile", gathered=keys * e if work.padded else gathered, tile=(queries + keys) * c)
    copied = bool(gathered) or work.padded or c != e
    # Widened whole they lie as they lay; a part of them, or what was changed, is row by row.
    row_by_row = bool(gathered) or work.padded or (c != e and tile.keys < work.keys)
    laid = not row_by_row and Apart.of(work).v and here.one.batch > 1
    values = here.one.batch * work.kv_heads * tile.keys * work.value_dim * c if laid else 0
    return ((queries + keys) * c if c != e else keys * e if copied else 0), values


def backward_tile(ledger: Ledger, work: Workload, *, mask: bool) -> None:
    """While a tile is gone through again.

    Its scores are there with the graph that made them, once more to become weights, and with the gradient of the
    weights, which becomes theirs.
    """
    held = dict(ledger.held)
    for here in _Here.all_of(work):
        _backward_tile(ledger, here, mask=mask)
        ledger.held = dict(held)


def _backward_tile(ledger: Ledger, here: _Here, *, mask: bool) -> None:
    work, tile, c, one, rows, scores = here.work, here.tile, here.itemsize, here.one, here.rows, here.scores
    leaves, _ = _leaves(ledger, here)
    factors = Factors.of(one, rows)
    queries, keys = one.batch * work.heads * tile.queries, one.batch * work.kv_heads * tile.keys
    ledger.hold(tile=leaves, limits=here.limits(tile.remembered))
    score_tile(ledger, here)
    upstream = queries * work.value_dim * c if c != work.itemsize else 0
    ledger.hold(factors=made_factors(one, rows, factors), scores=scores, flowing=upstream)
    if work.spec.softcap is not None:
        ledger.hold(capped=scores)
    if biased := bias_elements(one, rows):
        ledger.hold(biases=biased // work.heads * position_cost(work).pair_kept)
    if here.told and not work.bool_mask:
        ledger.hold(biases=here.told)
    ledger.hold(limits=here.limits(tile.limits - tile.remembered))
    of_v = keys * work.value_dim * c
    if work.dropped:
        ledger.phase("dropout", weights=scores, of_weights=scores, drawing=24 * here.pairs)
    dropped = here.pairs + 2 * scores if work.dropped else 0  # which of them are kept, and their gradient too
    if _streamed(work):
        ledger.phase("backward of attention", weights=scores, of_weights=scores, dropped=dropped, of_values=of_v)
    else:
        cost = normalizer_cost(work)
        ledger.phase("backward of attention", weights=scores + here.pairs * cost.held)
        back, block = here.pairs * cost.held_backward, queries * work.value_dim * max(c, 4)
        if dropped:
            ledger.phase("backward of attention", weights=2 * scores, block=block, of_values=of_v, dropped=dropped)
        ledger.phase("backward of attention", weights=scores + back, block=block, of_values=of_v)
    # The weights are freed with the function that found them; the hidden scores that they were stay.
    flowing = 2 * scores
    of_q, of_k = queries * work.head_dim * c, factors.key or keys * work.head_dim * c
    if biased and biased < here.pairs:  # summed over the batch
        ledger.phase("backward of attention", flowing=flowing, of_values=of_v, of_bias=biased * c)
    ledger.drop("biases")
    if work.spec.softcap is not None:
        ledger.phase("backward of attention", flowing=flowing + 2 * scores, of_values=of_v)
    ledger.drop("capped")
    of_mask = here.told * c if mask else 0
    layers = score_cost(work).backward_layers * min(BLOCK, here.pairs * score_cost(work).layer) * c
    gradients = of_q + of_k + of_mask
    ledger.phase("backward of attention", flowing=flowing, of_values=of_v, gradients=gradients, layers=layers)
    if back := score_cost(work).key_back:  # and through what the factors were made of
        ledger.lessen("factors", factors.query + factors.key)
        ledger.phase("backward of attention", flowing=flowing, of_values=of_v, gradients=gradients + back * of_k)
        made, of_factor = queries * work.head_dim * c, queries * score_cost(work).query_width * c
        gradients = keys * work.head_dim * c + of_factor + of_mask
        ledger.phase("backward of attention", flowing=flowing, of_values=of_v, gradients=gradients + back * made)

"""One tile of the blocked kernel on sketches, as far as both ways go through it; and which kinds of tiles there are."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from attention_service.core import steps
from attention_service.core.dropout import sketched_dropped, sketched_keep
from attention_service.core.kernels.tiling import Layout
from attention_service.core.kernels.touched import sequences, tiling_of, whole_rows
from attention_service.core.normalizers import NORMALIZERS
from attention_service.core.positions import POSITIONS
from attention_service.core.scores import SCORES
from attention_service.core.tape import BOOL, CUT_ROWS, CUT_SPLIT, INTEGER, SPLIT, Number, Sketch, Tape
from attention_service.cost.pairs import softmax_itemsize
from attention_service.cost.sketched import Sketched, key_places, own_mask, placed, real_keys
from attention_service.cost.strips import Strips, strips_of


@dataclass(frozen=True)
class Leaves:
    """What meets in a tile."""

    q: Sketch
    k: Sketch
    v: Sketch


@dataclass(frozen=True)
class Tile:
    """What all tiles with as many queries have in common, in a group of sequences; keys are so many on average."""

    given: Sketched
    """Of the sequences of the group."""
    kind: Strips
    places: tuple[Sketch, Sketch] | None
    """Of queries and keys, where there is a bias."""
    first: bool
    """Whether this is the first group, which finds nothing remembered."""

    @property
    def width(self) -> float:
        """Keys."""
        return each_of(self.kind.width, self.kind.strips)

    @property
    def sums_in(self) -> int:
        """Bytes of what is summed over tiles."""
        return max(self.given.scored_in, 4)

    @property
    def pairs(self) -> tuple[Number, ...]:
        """``[B, H, q, k]``."""
        return self.given.work.batch, self.given.work.heads, self.kind.rows, self.width

    def cut(self, x: Sketch) -> Sketch:
        """The queries of a block."""
        lies = x.lies
        if self.kind.rows != x.dims[2]:
            lies = CUT_SPLIT if x.lies == SPLIT else CUT_ROWS
        return Sketch((*x.dims[:2], self.kind.rows, x.dims[3]), x.itemsize, lies)

    def gathered(self, tape: Tape, each: Number) -> None:
        """Keys that are not side by side are put together: so many bytes for each of them."""
        if self.kind.joined:
            with tape.repeated(self.kind.joined / self.kind.strips):
                copy = each * self.kind.joined_width / self.kind.joined
                tape.does(copy, copy)


def tiles_of(tape: Tape, given: Sketched) -> Iterator[tuple[Tile, int]]:
    """Each kind of tile, and in how many groups of sequences; what each group takes is counted on the way."""
    work = given.work
    fitted = tiling_of(work)
    layout = Layout(given.pattern(), work.past, work.queries, work.met_keys, work.extra)
    kinds = strips_of(layout, fitted, rows_whole=whole_rows(work))
    at_once = sequences(work, fitted)
    full, rest = divmod(work.batch, at_once)
    groups = [(at_once, min(full, 1), True), (at_once, full - 1, False), (rest, int(rest > 0), not full)]
    if work.batched_offsets and work.spec.masks:  # each sequence stands at another place, where tiles look otherwise
        steps.plain(tape, Sketch((work.batch,), INTEGER))
        groups = [(1, work.batch, True)]
    for size, times, first in groups:
        if times <= 0 or not size:
            continue
        group = replace(work, batch=size)
        q, k, v = (Sketch((size, *x.dims[1:]), x.itemsize, x.lies) for x in (given.q, given.k, given.v))
        learned = {name: Sketch(x.dims, x.itemsize) for name, x in given.learned.items()}
        some = Sketched(group, q, k, v, learned, given.tokens)
        with tape.repeated(times):
            if real_keys(tape, group) is not None:
                tape.does(size * work.told_keys, work.told_keys)  # keys that are real in any of them
            places = None
            if POSITIONS.of(work.spec.position).biased:
                queries, new = placed(tape, group)
                places = queries, key_places(tape, group, new)
        for kind in kinds:
            yield Tile(some, kind, places, first), times


def sinks_of(tape: Tape, tile: Tile) -> Sketch:
    """As scores of a tile are."""
    sinks = steps.cast(tape, tile.given.learned["sinks"], tile.given.scored_in)
    return steps.plain(tape, steps.cast(tape, steps.plain(tape, sinks), tile.sums_in))


def leaves_of(tape: Tape, tile: Tile) -> Leaves:
    """The parts of q, k and v."""
    given, width = tile.given, tile.width
    parts = []
    for x in (given.k, given.v):
        batch, heads, _, each = x.dims
        tile.gathered(tape, batch * heads * each * x.itemsize)
        parts.append(Sketch((batch, heads, width, each), x.itemsize, x.lies))
    k, v = parts
    if given.work.padded:
        where = _padded_keys(tape, tile)
        mask = Sketch((where.dims[0], 1, width, 1), BOOL)
        k, v = steps.hide(tape, k, mask), steps.hide(tape, v, mask)
    q = steps.cast(tape, tile.cut(given.q), given.scored_in)
    return Leaves(q, steps.cast(tape, k, given.scored_in), steps.cast(tape, v, tile.sums_in))


def _padded_keys(tape: Tape, tile: Tile) -> Sketch:
    """Bool ``[B, k]``: which keys of a tile are padding."""
    batch = tile.given.work.batch
    tile.gathered(tape, batch)
    return steps.plain(tape, Sketch((batch, tile.width), BOOL))


def scored(tape: Tape, tile: Tile, leaves: Leaves, learned: Mapping[str, Sketch]) -> Sketch:
    """The scores, what is added to them included."""
    given, work = tile.given, tile.given.work
    x = SCORES.of(work.spec.score).sketched(tape, leaves.q, leaves.k, learned)
    if work.spec.softcap is not None:
        x = steps.scale(tape, steps.saved(tape, steps.scale(tape, x)))
    if tile.places is not None:
        x = steps.add(tape, x, _bias(tape, tile, tile.places, learned))
    mask = own_mask(work)
    if mask is not None and not work.bool_mask:
        told = _told(tape, tile, mask)
        told = steps.plain(tape, told, steps.plain(tape, told, itemsize=BOOL))
        x = steps.add(tape, x, steps.cast(tape, told, given.scored_in))
    return x


def _bias(tape: Tape, tile: Tile, places: tuple[Sketch, Sketch], learned: Mapping[str, Sketch]) -> Sketch:
    """Made for each stretch of keys, and put together."""
    work, kind, e = tile.given.work, tile.kind, tile.given.scored_in
    queries = Sketch((places[0].dims[0], kind.rows), INTEGER)
    stretches = kind.spans / kind.strips
    keys = Sketch((places[1].dims[0], tile.width / stretches), INTEGER)
    with tape.repeated(stretches):
        bias = POSITIONS.of(work.spec.position).sketched_bias(tape, queries, keys, work.heads, learned, e)
        if work.extra:
            steps.plain(tape, steps.filled(tape, (work.keys,), INTEGER), itemsize=BOOL)
            bias = steps.hide(tape, bias, Sketch((1, 1, 1, keys.dims[1]), BOOL))
    rows = bias.dims[0]
    tile.gathered(tape, rows * work.heads * kind.rows * e)
    whole = Sketch((rows, work.heads, kind.rows, tile.width), e, tracked=bias.tracked)

    def step() -> None:
        tables = sum(learned[name].size * e for name in POSITIONS.of(work.spec.position).learned(work.widths))
        tape.does(2 * tables * (stretches - 1), tables * (stretches - 1), 0, stretches - 1)
        tape.give(bias, bias.size)

    return tape.later(whole, step) if whole.tracked else whole


def _told(tape: Tape, tile: Tile, mask: Sketch) -> Sketch:
    """The part of the request's mask: a view, or put together."""
    dims = _mask_dims(tile, mask)
    each = steps.size_of(dims) * mask.itemsize
    tile.gathered(tape, each)
    if tile.given.work.extra:  # the last stretch, which is longer than the mask
        with tape.repeated(tile.kind.looking / tile.kind.strips):
            tape.does(0, each * tile.given.work.extra)
            tape.does(each * tile.width, each * tile.width)
    return Sketch((*dims, tile.width), mask.itemsize)


def hidden(tape: Tape, tile: Tile, x: Sketch) -> Sketch:
    """−∞ wherever it is forbidden to look, in place."""
    given, work, kind = tile.given, tile.given.work, tile.kind
    e = x.itemsize
    if kind.masked:
        p, j = Sketch((kind.rows, 1), INTEGER), Sketch((1, each_of(kind.masked_width, kind.masked)), INTEGER)
        limits = given.pattern().sketched(Tape(), p, j).size * e
        piece = Sketch((*x.dims[:3], j.dims[1]), e)
        with tape.repeated(kind.masked / kind.strips):
            if work.threads:
                tape.does(piece.bytes, e)
                tape.does(3 * e + 2, e + 3, 0, 4)  # is that finite?
                tape.does(piece.bytes + limits, piece.bytes)
            else:
                tape.does(limits, limits / e)
                tape.does(piece.bytes + limits / e, piece.bytes)
        new, wide = (kind.fresh, kind.fresh_width) if tile.first else (kind.fresh_again, kind.fresh_again_width)
        if new:
            with tape.repeated(new / kind.strips):
                laid_out(tape, tile, wide / new)
    if work.padded:
        where = _padded_keys(tape, tile)
        tape.does(x.bytes + where.bytes, x.bytes)
    mask = own_mask(work)
    if mask is not None:
        told = (
            _told(tape, tile, mask) if work.bool_mask else Sketch((*_mask_dims(tile, mask), tile.width), mask.itemsize)
        )
        steps.changed(tape, x, steps.plain(tape, told, itemsize=BOOL))
    return x


def _mask_dims(tile: Tile, mask: Sketch) -> tuple[Number, ...]:
    batch, heads, queries, _ = mask.dims
    return min(batch, tile.given.work.batch), heads, 1 if queries == 1 else tile.kind.rows


def laid_out(tape: Tape, tile: Tile, width: float) -> None:
    """The limits of a piece that looks like none before."""
    e = tile.given.scored_in
    p, j = steps.filled(tape, (tile.kind.rows,), INTEGER), steps.filled(tape, (width,), INTEGER)
    tape.does(e, e)
    allowed = tile.given.pattern().sketched(tape, Sketch((p.size, 1), INTEGER), Sketch((1, j.size), INTEGER))
    tape.does(allowed.bytes + 2 * e, allowed.size * e)


def weighed(tape: Tape, tile: Tile, x: Sketch, v: Sketch) -> Sketch:
    """Weights for themselves, or of whole rows."""
    work = tile.given.work
    if work.padded:
        tape.does(work.batch * work.keys, work.batch * INTEGER)
    else:
        tape.does(0, work.batch * INTEGER)
    normalizer = NORMALIZERS.of(work.spec.normalizer)
    weights = normalizer.sketched(tape, x, softmax_itemsize(work), tile.given.learned, padded=True)
    return steps.product(tape, dropped(tape, tile, steps.cast(tape, weights, tile.sums_in)), v)


def exponentials(tape: Tape, x: Sketch) -> Sketch:
    """Of scores, in place."""
    return steps.changed(tape, steps.changed(tape, x), functions=1)


def dropped(tape: Tape, tile: Tile, x: Sketch) -> Sketch:
    """The weights that dropout keeps, divided."""
    if not tile.given.work.dropped:
        return x
    batch, heads, rows, width = tile.pairs
    for size in (batch, heads, rows):
        steps.filled(tape, (size,), INTEGER)
    stretches = tile.kind.spans / tile.kind.strips
    with tape.repeated(stretches):
        steps.filled(tape, (width / stretches,), INTEGER)
    tape.does(width * INTEGER, width * INTEGER)
    return sketched_dropped(tape, x, sketched_keep(tape, (batch, heads, rows, width)))


def each_of(total: float, count: float) -> float:
    """On average."""
    return total / count if count else 0.0

"""The blocked kernel where PyTorch's fused one computes its blocks, on sketches: a block of each kind."""

from dataclasses import replace

from attention_service.core import steps
from attention_service.core.scores import SCORES, Product
from attention_service.core.tape import BOOL, INTEGER, Number, Sketch, Tape
from attention_service.cost.sketched import Sketched
from attention_service.cost.sketched_fused_call import as_wide
from attention_service.cost.sketched_tiles import Tile, laid_out, tiles_of


def fused_blocks(tape: Tape, given: Sketched) -> Sketch:
    """The context, and the way back through every block again."""
    work = given.work
    score = SCORES.of(work.spec.score)
    if not isinstance(score, Product):
        raise ValueError("the fused kernel computes a plain softmax over dot products")
    q, k, _ = score.sketched_factors(tape, given.q, given.k, given.learned)
    v = given.v
    width = max(q.dims[3], v.dims[3])
    q, k, v = (as_wide(tape, x, width) for x in (q, k, v))
    context = steps.like(q, tracked=q.tracked or k.tracked or v.tracked)
    made = replace(given, q=q, k=k, v=v)
    with_lse = "lse" in work.taps
    for tile, times in tiles_of(tape, made):
        with tape.repeated(times):
            _forward(tape, tile, with_lse=with_lse)

    def step() -> None:
        wide = max(work.itemsize, 4)
        for x, itemsize in ((q, work.itemsize), (k, wide), (v, wide)):
            steps.filled(tape, x.dims, itemsize)
        for tile, times in tiles_of(tape, made):
            with tape.repeated(times):
                _backward(tape, tile, context)
        for x in (k, v):
            steps.cast(tape, Sketch(x.dims, wide), work.itemsize)
        for x in (v, k, q):
            tape.give(x, x.size, x.lies)

    if context.tracked:
        tape.later(context, step)
    return context if context.dims[3] == work.value_dim else steps.part(tape, context, (*q.dims[:3], work.value_dim))


def _forward(tape: Tape, tile: Tile, *, with_lse: bool) -> None:
    """All blocks of one kind: an operation, whose answers are put where they belong."""
    kind = tile.kind
    context, sums = _answers(tile)
    with tape.repeated(kind.looking):
        taken = _taken(tape, tile)
        tape.does(taken, context.bytes + sums.bytes, _pairs(tile))
        for x in (context, sums):
            tape.does(x.bytes, x.bytes)
        if with_lse:
            tape.does(sums.bytes, sums.bytes)
    with tape.repeated(kind.blocks - kind.looking):
        for x in (context, sums, *([sums] if with_lse else [])):
            tape.does(0, x.bytes)
    _hidden(tape, tile)
    if with_lse and kind.hiding:
        with tape.repeated(kind.hiding):
            mask = _mask(tile)
            row = steps.reduced(tape, mask, (kind.rows,))
            blind = steps.plain(tape, row, itemsize=BOOL)
            tape.does(sums.bytes + blind.bytes, sums.bytes)


def _backward(tape: Tape, tile: Tile, context: Sketch) -> None:
    """The same blocks, and the gradients of keys and values added up."""
    kind, work = tile.kind, tile.given.work
    if not kind.looking:  # no stretch of keys is gone through
        return
    part, sums = _answers(tile)
    stretches = kind.spans / kind.strips
    came = context.gradient * context.itemsize * part.size / max(context.size, 1)
    with tape.repeated(kind.looking):
        taken = _taken(tape, tile)
        three = _three(tile)
        found = sum(x.bytes for x in three)
        tape.does(came + taken + part.bytes + sums.bytes, found, _pairs(tile))
        tape.does(three[0].bytes, three[0].bytes)
        for x in three[1:]:
            own = Sketch((x.dims[0], work.kv_heads, *x.dims[2:]), x.itemsize)
            if work.heads != work.kv_heads:
                steps.reduced(tape, x, own.dims)
            tape.does(own.size * (tile.sums_in + own.itemsize), own.size * tile.sums_in, 0, stretches)
    _hidden(tape, tile)


def _answers(tile: Tile) -> tuple[Sketch, Sketch]:
    """The context of a block, and a number for each query."""
    q = tile.given.q
    context = Sketch((*q.dims[:2], tile.kind.rows, q.dims[3]), q.itemsize)
    return context, Sketch(context.dims[:3], tile.sums_in)


def _three(tile: Tile) -> tuple[Sketch, Sketch, Sketch]:
    """The queries of a block, and as many heads of its keys and values."""
    q, work = tile.given.q, tile.given.work
    keys = (work.batch, work.heads, tile.width, q.dims[3])
    k, v = (Sketch(keys, q.itemsize) for _ in "kv")
    return Sketch((*q.dims[:2], tile.kind.rows, q.dims[3]), q.itemsize), k, v


def _taken(tape: Tape, tile: Tile) -> Number:
    """Bytes that the operation reads, its mask included; keys put together and repeated before."""
    work = tile.given.work
    three = _three(tile)
    for x in three[1:]:
        own = x.bytes / work.heads * work.kv_heads
        tile.gathered(tape, own / max(tile.width, 1))
        if work.heads != work.kv_heads:
            tape.does(own, x.bytes)
    share = tile.kind.hiding_width / tile.kind.width if tile.kind.width else 0
    return sum(x.bytes for x in three) + share * tile.kind.rows * tile.width * tile.given.scored_in


def _mask(tile: Tile) -> Sketch:
    """What is added to the scores of a block in which something is hidden."""
    return Sketch((tile.kind.rows, tile.kind.hiding_width / tile.kind.hiding), tile.given.scored_in)


def _hidden(tape: Tape, tile: Tile) -> None:
    """The masks made: zeros, and −∞ in each piece in which something is hidden."""
    kind, e = tile.kind, tile.given.scored_in
    if not kind.masked:
        return
    with tape.repeated(kind.hiding):
        tape.does(0, _mask(tile).bytes)
    with tape.repeated(kind.masked):
        keys = Sketch((1, kind.masked_width / kind.masked), INTEGER)
        limits = tile.given.pattern().sketched(Tape(), Sketch((kind.rows, 1), INTEGER), keys).size * e
        piece = kind.rows * keys.dims[1] * e
        tape.does(piece + limits, piece)
    new, wide = (kind.fresh, kind.fresh_width) if tile.first else (kind.fresh_again, kind.fresh_again_width)
    if new:
        with tape.repeated(new):
            laid_out(tape, tile, wide / new)


def _pairs(tile: Tile) -> Number:
    work = tile.given.work
    return work.batch * work.heads * tile.kind.rows * tile.width

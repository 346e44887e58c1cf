"""The way back through the tiles of the blocked kernel, on sketches."""

from attention_service.core import steps
from attention_service.core.normalizers import NORMALIZERS, Exponential
from attention_service.core.positions import POSITIONS
from attention_service.core.scores import SCORES
from attention_service.core.tape import BOOL, Sketch, Tape
from attention_service.cost.sketched import Sketched
from attention_service.cost.sketched_tiles import (
    Leaves,
    Tile,
    dropped,
    exponentials,
    hidden,
    leaves_of,
    scored,
    sinks_of,
    tiles_of,
    weighed,
)


def back(tape: Tape, given: Sketched, context: Sketch) -> None:
    """Tile by tile again, and the gradients summed over them."""
    work = given.work
    streamed = isinstance(NORMALIZERS.of(work.spec.normalizer), Exponential)
    wide = max(given.scored_in, 4)
    named = {"q": given.q, "k": given.k, "v": given.v, **_read_by_tiles(given)}
    tape.does(0, context.size / work.value_dim * wide * streamed)  # the log-sum-exp has no gradient
    for x in named.values():
        steps.filled(tape, x.dims, wide)
    lies = context.gradient_lies
    for tile, times in tiles_of(tape, given):
        with tape.repeated(times):
            _tile_back(tape, tile, lies, streamed=streamed)
    for x in named.values():
        steps.cast(tape, Sketch(x.dims, wide), x.itemsize)
        tape.give(x, x.size)


def _read_by_tiles(given: Sketched) -> dict[str, Sketch]:
    """The learned tensors that make scores or weights; others, as of an encoding that is added, are given no sum."""
    spec, widths = given.work.spec, given.work.widths
    position = POSITIONS.of(spec.position)
    names = {*SCORES.of(spec.score).learned(widths), *NORMALIZERS.of(spec.normalizer).learned(widths)}
    names |= {*position.learned(widths)} if position.biased else set()
    return {name: x for name, x in given.learned.items() if name in names}


def _tile_back(tape: Tape, tile: Tile, lies: int, *, streamed: bool) -> None:
    kind, work = tile.kind, tile.given.work
    with tape.repeated(kind.blocks):
        gradient = Sketch((work.batch, work.heads, work.queries, work.value_dim), work.itemsize, lies)
        gradient = steps.cast(tape, tile.cut(gradient), tile.sums_in)
        row = Sketch((*gradient.dims[:3], 1), tile.sums_in)
        if streamed:
            context = steps.cast(tape, steps.like(gradient, work.itemsize), tile.sums_in)
            steps.reduced(tape, steps.plain(tape, gradient, context), row.dims)
            steps.plain(tape, row, steps.plain(tape, row, itemsize=BOOL))
            if "sinks" in tile.given.learned:
                _sinks_back(tape, tile, row)
    if not kind.strips:
        return
    with tape.repeated(kind.strips):
        leaves = leaves_of(tape, tile)
        again = Tape(differentiated=True)
        tracked = Leaves(_leaf(again, leaves.q), _leaf(again, leaves.k), leaves.v)
        learned = {name: _leaf(again, x) for name, x in tile.given.learned.items()}
        scores = scored(again, tile, tracked, learned)
        tape.absorb(again)
        x = hidden(tape, tile, steps.plain(tape, Sketch(scores.dims, scores.itemsize)))
        if streamed:
            of_scores = _streamed_back(tape, tile, x, leaves.v, gradient, row)
        else:
            of_scores = _weighed_back(tape, tile, x, leaves.v, gradient)
        _summed(tape, tile, leaves.v, tile.sums_in)
        steps.cast(tape, of_scores, scores.itemsize)
        again.back(scores)
        tape.absorb(again)
        part = leaves.q.size
        tape.does(part * (tile.sums_in + leaves.q.itemsize), part * tile.sums_in)
        _summed(tape, tile, leaves.k, leaves.k.itemsize)
        for leaf in learned.values():
            if leaf.came:
                tape.does(leaf.size * (tile.sums_in + leaf.itemsize), leaf.size * tile.sums_in)


def _leaf(tape: Tape, x: Sketch) -> Sketch:
    return tape.leaf(x.dims, x.itemsize, x.lies)


def _summed(tape: Tape, tile: Tile, x: Sketch, itemsize: int) -> None:
    """Added to the gradients of the keys, one stretch after the other."""
    tape.does(x.size * (tile.sums_in + itemsize), x.size * tile.sums_in, 0, tile.kind.spans / tile.kind.strips)


def _streamed_back(tape: Tape, tile: Tile, x: Sketch, v: Sketch, gradient: Sketch, row: Sketch) -> Sketch:
    """∂s = w·(∂o·vᵀ − Σ o·∂o), and ∂v."""
    tempered = tile.given.work.spec.normalizer.temperature != 1
    x = steps.cast(tape, x, tile.sums_in)
    if tempered:
        steps.changed(tape, x)
    weights = exponentials(tape, steps.changed(tape, x, row))
    of_weights = dropped(tape, tile, steps.product(tape, gradient, v, turned=True))
    seen = dropped(tape, tile, weights)
    if steps.apart(gradient, v.dims[1]):
        tape.does(gradient.bytes, gradient.bytes)
    tape.does(seen.bytes + gradient.bytes, v.bytes)
    steps.changed(tape, steps.changed(tape, of_weights, row), weights)
    return steps.changed(tape, of_weights) if tempered else of_weights


def _weighed_back(tape: Tape, tile: Tile, x: Sketch, v: Sketch, gradient: Sketch) -> Sketch:
    """Through the weights and their sum, with a graph of their own."""
    again = Tape(differentiated=True)
    scores = _leaf(again, x)
    part = weighed(again, tile, scores, _leaf(again, v))
    tape.absorb(again)
    again.back(part, lies=gradient.lies)
    tape.absorb(again)
    return Sketch(x.dims, x.itemsize)


def _sinks_back(tape: Tape, tile: Tile, row: Sketch) -> None:
    """A sink's weight times what the block passes back, summed."""
    learned = tile.given.learned["sinks"]
    sinks = sinks_of(tape, tile)
    weights = steps.changed(tape, steps.plain(tape, Sketch((1, sinks.size, 1, 1), sinks.itemsize), row), functions=1)
    found = steps.plain(tape, steps.plain(tape, weights), row)
    if tile.given.work.spec.normalizer.temperature != 1:
        steps.changed(tape, found)
    total = steps.reduced(tape, found, learned.dims)
    tape.does(2 * total.bytes, total.bytes)

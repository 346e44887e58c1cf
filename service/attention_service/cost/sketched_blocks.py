"""The blocked kernel on sketches, step by step: a tile of each kind, as many times as there are such tiles.

What it does to find its tiles is left out: those are small integers on the host. It may skip cells of padding between
real keys besides, and sequences at other places than the past may have other tiles, which is not known here.
"""

from attention_service.core import steps
from attention_service.core.normalizers import NORMALIZERS, Exponential
from attention_service.core.tape import BOOL, Sketch, Tape
from attention_service.cost.sketched import Sketched
from attention_service.cost.sketched_blocks_back import back
from attention_service.cost.sketched_tiles import (
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


def blocked(tape: Tape, given: Sketched) -> Sketch:
    """The context, and the way back through every tile again."""
    work = given.work
    three = (given.q, given.k, given.v, *given.learned.values())
    context = Sketch(
        (work.batch, work.heads, work.queries, work.value_dim), work.itemsize, tracked=any(x.tracked for x in three)
    )
    for tile, times in tiles_of(tape, given):
        with tape.repeated(times):
            _forward(tape, tile)

    def step() -> None:
        back(tape, given, context)

    return tape.later(context, step) if context.tracked else context


def _forward(tape: Tape, tile: Tile) -> None:
    """All blocks and strips of one kind."""
    kind, work = tile.kind, tile.given.work
    context = Sketch((work.batch, work.heads, kind.rows, work.value_dim), tile.sums_in)
    row = Sketch((*context.dims[:3], 1), tile.sums_in)
    streamed = isinstance(NORMALIZERS.of(work.spec.normalizer), Exponential)
    top = row
    with tape.repeated(kind.blocks):
        if streamed:
            top = _start(tape, tile, row)
        else:
            steps.filled(tape, context.dims, context.itemsize)
    if kind.strips:
        with tape.repeated(kind.strips):
            leaves = leaves_of(tape, tile)
            x = hidden(tape, tile, scored(tape, tile, leaves, tile.given.learned))
            if streamed:
                part = _streamed(tape, tile, x, leaves.v, row)
            else:
                part = weighed(tape, tile, x, leaves.v)
                steps.changed(tape, context, part)
        if streamed:
            tape.does(2 * kind.looking * (top.bytes - row.bytes), 0, 0, 0)  # sinks are there once for all queries
            with tape.repeated(kind.strips - kind.looking):
                steps.changed(tape, context, row)
                steps.changed(tape, context, part)
    with tape.repeated(kind.blocks - kind.looking if streamed else 0):
        steps.filled(tape, context.dims, context.itemsize)
    with tape.repeated(kind.blocks):
        if streamed:
            steps.changed(tape, context, steps.plain(tape, row, steps.plain(tape, row, itemsize=BOOL)))
            of_block = steps.plain(tape, row, steps.plain(tape, row, functions=1))
            tape.does(of_block.bytes, of_block.bytes)
        tape.does(context.bytes, context.size * work.itemsize)


def _start(tape: Tape, tile: Tile, row: Sketch) -> Sketch:
    """The maximum and sum before the first key."""
    if "sinks" not in tile.given.learned:
        steps.filled(tape, row.dims, row.itemsize)
        steps.filled(tape, row.dims, row.itemsize)
        return row
    sinks = sinks_of(tape, tile)
    steps.filled(tape, row.dims, row.itemsize)
    return sinks


def _streamed(tape: Tape, tile: Tile, x: Sketch, v: Sketch, row: Sketch) -> Sketch:
    """With a running maximum and sum."""
    x = steps.cast(tape, x, tile.sums_in)
    if tile.given.work.spec.normalizer.temperature != 1:
        steps.changed(tape, x)
    highest = steps.plain(tape, steps.reduced(tape, x, row.dims), row)
    shift = steps.plain(tape, highest, steps.plain(tape, highest, itemsize=BOOL))
    weights = exponentials(tape, steps.changed(tape, x, shift))
    steps.changed(tape, steps.plain(tape, row, shift), functions=1)
    steps.plain(tape, row, row)
    steps.plain(tape, row, steps.reduced(tape, weights, row.dims))
    return steps.product(tape, dropped(tape, tile, weights), v)

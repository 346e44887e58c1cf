"""What one chunk of a running state takes on sketches: fading, what is replaced, and what is found.

Letters as in ``methods.running``, whose functions these follow.
"""

from dataclasses import dataclass

from attention_service.core import steps
from attention_service.core.tape import BOOL, CUT_SPLIT, INTEGER, ROWS, SPLIT, Number, Sketch, Tape


@dataclass(frozen=True)
class SketchedState:
    """``State`` of sketches."""

    value: Sketch
    log_factor: Sketch | None = None


def aligned(
    tape: Tape, state: SketchedState | None, log_factor: Sketch | None
) -> tuple[SketchedState | None, Sketch | None]:
    """A state with the larger of its factor and the new keys' left out; and what the keys are to be scaled by."""
    if log_factor is None or state is None or state.log_factor is None:
        return state, None
    larger = steps.plain(tape, state.log_factor, log_factor)
    of_state = steps.plain(tape, steps.plain(tape, state.log_factor, larger), functions=1)
    value = steps.multiply(tape, state.value, of_state)
    return SketchedState(value, larger), steps.plain(tape, steps.plain(tape, log_factor, larger), functions=1)


def summed(tape: Tape, x: Sketch) -> Sketch:
    """The running sum of a gate's logarithms; back, turned round, summed, and turned round again."""
    y = steps.like(x)
    tape.does(x.bytes, y.bytes)

    def step() -> None:
        if y.dims[2] > 1:
            tape.does(y.returned, y.bytes)
            tape.does(2 * y.bytes, 2 * y.bytes, 0, 2)
        tape.give(x, x.size)

    return tape.later(y, step) if y.tracked else y


def read(tape: Tape, q: Sketch, k: Sketch, v: Sketch, faded: Sketch | None, state: SketchedState | None) -> Sketch:
    """What the queries of a chunk find among its keys up to their own, and in the state before it."""
    if faded is None:
        pairs = _lower(tape, steps.product(tape, q, k, turned=True))
    elif faded.dims[3] == 1:
        inner = steps.product(tape, q, k, turned=True)
        pairs = _each_group(tape, inner, _fading(tape, faded))
    else:
        pairs = _pairs_by_feature(tape, q, k, faded)
    found = steps.product(tape, pairs, v)
    if state is None:
        return found
    if faded is not None:
        q = _each_group(tape, q, left(tape, faded))
    return steps.add(tape, found, steps.product(tape, q, state.value))


def _lower(tape: Tape, x: Sketch) -> Sketch:
    """Zeros above the diagonal, and in the gradient."""
    return steps.scale(tape, x)


def _each_group(tape: Tape, x: Sketch, y: Sketch) -> Sketch:
    """X ``[B, H, ...]`` times y ``[B, Hkv, ...]``, the same for all query heads of a group."""
    batch, heads, *rest = x.dims
    group = heads / y.dims[1]
    x5 = steps.view(tape, x, (batch, y.dims[1], group, *rest))
    x5.lies = x.lies
    y5 = steps.view(tape, y, (*y.dims[:2], 1, *y.dims[2:]))
    z = steps.view(tape, steps.multiply(tape, x5, y5), x.dims)
    z.lies = SPLIT if x.lies in {SPLIT, CUT_SPLIT} else ROWS
    return z


def _fading(tape: Tape, faded: Sketch) -> Sketch:
    length = faded.dims[2]
    turned = faded if length == 1 else steps.view(tape, faded, (*faded.dims[:2], 1, length))
    apart = steps.add(tape, faded, turned, minus=True)
    return left(tape, steps.hide(tape, apart, _ahead(tape, length)))


def left(tape: Tape, exponents: Sketch) -> Sketch:
    """exp, and 0 where that is too small."""
    small = steps.plain(tape, exponents, itemsize=BOOL)
    return steps.saved(tape, steps.hide(tape, exponents, small))


def _ahead(tape: Tape, length: Number) -> Sketch:
    steps.filled(tape, (length,), INTEGER)
    index = Sketch((length,), INTEGER)
    tape.does(2 * index.bytes, length * length)
    return Sketch((length, length), BOOL)


def _pairs_by_feature(tape: Tape, q: Sketch, k: Sketch, faded: Sketch) -> Sketch:
    batch, heads, length, width = q.dims
    kv_heads = k.dims[1]
    ahead = _ahead(tape, length)
    rows = steps.view(tape, faded, (batch, kv_heads, length, 1, width))
    columns = steps.view(tape, faded, (batch, kv_heads, 1, length, width))
    if length == 1:
        columns = rows
    apart = steps.add(tape, rows, columns, minus=True)
    remains = left(tape, steps.hide(tape, apart, Sketch((length, length, 1), ahead.itemsize)))
    weighed = steps.multiply(tape, steps.view(tape, k, (batch, kv_heads, 1, length, width)), remains)
    weighed = steps.view(tape, weighed, (batch, kv_heads, 1, length, length, width))
    grouped = steps.view(tape, q, (batch, kv_heads, heads / kv_heads, length, 1, width))
    both = steps.multiply(tape, grouped, weighed)
    pairs = steps.total(tape, both, (batch, kv_heads, heads / kv_heads, length, length))
    return steps.view(tape, pairs, (batch, heads, length, length))


def replaced(
    tape: Tape, k: Sketch, v: Sketch, beta: Sketch, faded: Sketch | None, state: SketchedState | None
) -> Sketch:
    """What the delta rule writes, for the tokens of a chunk at once."""
    if faded is not None and faded.dims[3] != 1:
        overlap = _pairs_by_feature(tape, k, k, faded)
    else:
        overlap = steps.product(tape, k, k, turned=True)
        if faded is not None:
            overlap = steps.multiply(tape, overlap, _fading(tape, faded))
    if state is not None:
        reading = k if faded is None else steps.multiply(tape, k, left(tape, faded))
        v = steps.add(tape, v, steps.product(tape, reading, state.value), minus=True)
    matrix, right = steps.multiply(tape, beta, overlap), steps.multiply(tape, beta, v)
    return _solved(tape, matrix, right)


def _solved(tape: Tape, matrix: Sketch, right: Sketch) -> Sketch:
    """The triangular system; back, that of the transpose, and the part below the diagonal of a product."""
    x = Sketch(right.dims, right.itemsize, tracked=matrix.tracked or right.tracked)
    tape.does(matrix.bytes + right.bytes, x.bytes)

    def step() -> None:
        tape.does(matrix.bytes + x.returned, x.bytes)
        tape.does(2 * x.bytes, matrix.bytes)
        tape.does(2 * matrix.bytes, 2 * matrix.bytes, 0, 2)
        tape.give(matrix, matrix.size)
        tape.give(right, right.size)

    return tape.later(x, step) if x.tracked else x

"""Nyström attention on sketches, step by step; letters as in ``methods.nystrom``."""

from dataclasses import dataclass

from attention_contract import spec
from attention_service.core import steps
from attention_service.core.methods.around import sketched_scored
from attention_service.core.methods.base import Given
from attention_service.core.tape import BOOL, INTEGER, ROWS, SPLIT, TURNED, Number, Sketch, Tape


@dataclass(frozen=True)
class _Means:
    """Which averages there are, and what padding leaves of the landmarks."""

    of_queries: Sketch
    of_keys: Sketch
    used: Sketch | None = None
    seen: Sketch | None = None
    real: Sketch | None = None
    alone: Sketch | None = None


def nystrom_context(tape: Tape, given: Given, options: spec.Nystrom) -> Sketch:
    """The context."""
    q, k, _ = sketched_scored(tape, given)
    a = max(q.itemsize, 4)
    q = steps.scale(tape, steps.cast(tape, q, a))
    k, v = (steps.cast(tape, x, a) for x in (k, given.v))
    queries, keys = q.dims[2], k.dims[2]
    count = min(options.landmarks, queries, keys)
    if given.real is None and count == queries == keys:
        weights = steps.saved(tape, steps.product(tape, q, k, turned=True))
        return steps.cast(tape, steps.product(tape, weights, v), given.q.itemsize)
    means = _means(tape, given, count, a)
    landmarks_q, landmarks_k = _mean(tape, means.of_queries, q), _mean(tape, means.of_keys, k)
    left = _softmax(tape, steps.product(tape, q, landmarks_k, turned=True), means.seen)
    middle = _softmax(tape, steps.product(tape, landmarks_q, landmarks_k, turned=True), means.seen)
    if means.used is not None:
        batch = means.used.dims[0]
        rows, columns = Sketch((batch, 1, count, 1), BOOL), Sketch((batch, 1, 1, count), BOOL)
        both = steps.plain(tape, *((rows, columns) if count > 1 else (rows,)))
        middle = steps.choose(tape, both, middle, _identity(tape, count, a))
    right = _softmax(tape, steps.product(tape, landmarks_q, k, turned=True), means.real)
    mixing = steps.product(tape, left, _inverse(tape, middle, options.iterations))
    if means.alone is not None:
        places = Sketch((means.of_queries.dims[0], 1, queries, count), a)
        mixing = steps.choose(tape, means.alone, places, mixing)
    context = steps.product(tape, mixing, steps.product(tape, right, v))
    return steps.cast(tape, context, given.q.itemsize)


def _means(tape: Tape, given: Given, count: Number, itemsize: int) -> _Means:
    queries, keys = given.q.dims[2], given.k.dims[2]
    real = given.real
    if real is None:
        one = steps.filled(tape, (1, 1), BOOL)
        number = steps.filled(tape, (1,), INTEGER)
        of_queries, of_keys = (
            _averages(tape, Sketch((1, length), BOOL).stored(one.size), number, count, itemsize)
            for length in (queries, keys)
        )
        return _Means(of_queries, of_keys)
    batch = real.dims[0]
    own = queries == keys - given.past
    asked = Sketch((batch, queries), BOOL) if own else steps.filled(tape, (batch, queries), BOOL)
    row = (batch,)
    totals = [steps.reduced(tape, x, row, INTEGER) for x in (asked, real)]
    number = steps.plain(tape, steps.plain(tape, *totals))
    index = steps.filled(tape, (count,), INTEGER)
    used = steps.plain(tape, index, Sketch((batch, 1), INTEGER), itemsize=BOOL)
    of_queries, of_keys = (_averages(tape, x, number, count, itemsize) for x in (asked, real))
    seen, kept = (Sketch((batch, 1, 1, _or_all(tape, x).dims[1]), BOOL) for x in (used, real))
    each = [steps.plain(tape, number, total, itemsize=BOOL) for total in totals]
    alone = steps.plain(tape, *each)
    return _Means(of_queries, of_keys, used, seen, kept, Sketch((alone.dims[0], 1, 1, 1), BOOL))


def _or_all(tape: Tape, x: Sketch) -> Sketch:
    nothing = steps.plain(tape, steps.reduced(tape, x, (x.dims[0], 1)))
    return steps.plain(tape, x, nothing)


def _averages(tape: Tape, real: Sketch, number: Sketch, count: Number, itemsize: int) -> Sketch:
    batch, length = real.dims
    place = steps.plain(tape, steps.plain(tape, real, itemsize=INTEGER))
    total = steps.plain(tape, steps.reduced(tape, real, (batch, 1), INTEGER))
    column = Sketch((batch, 1), INTEGER)
    segment = steps.plain(tape, steps.plain(tape, place, column), total)
    segment = steps.plain(tape, segment, steps.plain(tape, real))
    landmarks = steps.filled(tape, (count,), INTEGER)
    members = Sketch((batch, count, length), BOOL)
    tape.does(segment.bytes + landmarks.bytes, members.bytes)
    wide = steps.cast(tape, members, itemsize)
    sums = steps.plain(tape, steps.reduced(tape, members, (batch, count, 1), INTEGER))
    return steps.plain(tape, wide, sums)


def _mean(tape: Tape, averages: Sketch, x: Sketch) -> Sketch:
    """``[B, heads, L, D]`` to ``[B, heads, m, D]``, all heads of a sequence in one product."""
    beside = steps.merge_heads(tape, x)
    batch, heads, _, width = x.dims
    count = averages.dims[1]
    means = Sketch((batch, heads, count, width), x.itemsize, SPLIT, tracked=x.tracked)
    tape.does(averages.bytes + beside.bytes, means.bytes)

    def step() -> None:
        if means.gradient_lies == ROWS and heads > 1 and count > 1:
            tape.does(means.returned, means.bytes)
        tape.does(means.bytes + averages.bytes, beside.bytes)
        tape.give(beside, beside.size)

    return tape.later(means, step) if means.tracked else means


def _softmax(tape: Tape, x: Sketch, seen: Sketch | None) -> Sketch:
    if seen is not None:
        x = steps.hide(tape, x, steps.plain(tape, seen))
    return steps.saved(tape, x)


def _identity(tape: Tape, count: Number, itemsize: int) -> Sketch:
    return steps.filled(tape, (count, count), itemsize)


def _inverse(tape: Tape, x: Sketch, iterations: int) -> Sketch:
    identity = _identity(tape, int(x.dims[3]), x.itemsize)
    z = steps.divide(tape, _turned(tape, x), _norm(tape, x))
    if not iterations:
        return z
    x = _shared(tape, x, iterations)
    # The first differs from the others in how z lies, which changes nothing that is counted.
    with tape.repeated(iterations):
        xz = steps.product(tape, x, z)
        inner = _less(tape, identity, xz)
        for _ in range(2):
            inner = _less(tape, identity, steps.product(tape, xz, inner))
        return steps.product(tape, steps.scale(tape, z), inner)


def _shared(tape: Tape, x: Sketch, times: int) -> Sketch:
    """X as it is used so many times, whose gradients are added up."""
    y = steps.like(x)
    y.lies = x.lies

    def step() -> None:
        tape.does(2 * (times - 1) * y.bytes, (times - 1) * y.bytes, 0, times - 1)
        tape.give(x, y.gradient, y.gradient_lies)

    return tape.later(y, step) if y.tracked else y


def _turned(tape: Tape, x: Sketch) -> Sketch:
    """The transpose, a view."""
    y = Sketch(x.dims, x.itemsize, TURNED, tracked=x.tracked)
    return tape.later(y, lambda: tape.give(x, y.gradient, TURNED)) if y.tracked else y


def _norm(tape: Tape, x: Sketch) -> Sketch:
    """The largest sum of a column; back, where it is the largest."""
    sums = steps.total(tape, x, (*x.dims[:2], x.dims[3]))
    top = Sketch((*x.dims[:2], 1, 1), x.itemsize, tracked=x.tracked)
    tape.does(sums.bytes, top.bytes)

    def step() -> None:
        tape.does(sums.bytes + top.bytes, sums.size * BOOL)
        tape.does(sums.size * BOOL, top.size * INTEGER)
        tape.does(top.returned + top.size * INTEGER, top.bytes)
        tape.does(top.bytes + sums.size * BOOL, sums.bytes)
        tape.give(sums, sums.size)

    return tape.later(top, step) if top.tracked else top


def _less(tape: Tape, identity: Sketch, x: Sketch) -> Sketch:
    """A multiple of the identity less x."""
    return steps.add(tape, steps.plain(tape, identity), x, minus=True)

"""The masks of a problem on sketches: ``core.visibility``, step by step."""

from dataclasses import dataclass

from attention_service.core import steps
from attention_service.core.masks import pattern_of
from attention_service.core.positions import POSITIONS
from attention_service.core.tape import BOOL, INTEGER, Number, Sketch, Tape
from attention_service.cost.sketched import Sketched, key_places, own_mask, padded, placed, real_keys, shifted
from attention_service.cost.workload import Workload


@dataclass(frozen=True)
class Seen:
    """What every mask of a problem says together."""

    allowed: Sketch | None
    bias: Sketch | None


@dataclass(frozen=True)
class Rows:
    """Which heads and queries are gone through; None for all."""

    heads: Number | None = None
    queries: Number | None = None


ALL = Rows()


def visible(tape: Tape, work: Workload, rows: Rows = ALL, *, positional: bool = True) -> Seen:
    """``visibility``; not ``positional``: without the spec's masks."""
    parts = []
    if work.spec.masks and positional:
        parts.append(_allowed(tape, work, rows))
    real = real_keys(tape, work)
    if real is not None:
        parts.append(Sketch((real.dims[0], 1, 1, real.dims[1]), BOOL))
    told = _told(tape, work, rows)
    if told is not None and work.bool_mask:
        parts.append(told)
    together = None
    for part in parts:
        together = part if together is None else steps.plain(tape, together, part)
    return Seen(together, None if work.bool_mask else told)


def forbid(tape: Tape, seen: Seen, x: Sketch) -> Sketch:
    """The bias added, and what is forbidden hidden."""
    if seen.bias is not None:
        forbidden = steps.plain(tape, seen.bias, itemsize=BOOL)
        x = steps.hide(tape, steps.add(tape, x, steps.cast(tape, seen.bias, x.itemsize)), forbidden)
    if seen.allowed is not None:
        x = steps.hide(tape, x, steps.plain(tape, seen.allowed))
    return x


def bias_of(tape: Tape, given: Sketched, rows: Rows = ALL) -> Sketch | None:
    """The bias of the position encoding, for all keys; None where it has none."""
    work = given.work
    position = POSITIONS.of(work.spec.position)
    if not position.biased:
        return None
    queries, new = placed(tape, work)
    keys = key_places(tape, work, new)
    if rows.queries is not None:
        queries = pick(tape, queries, (queries.dims[0], rows.queries), rows.queries)
    heads = work.heads if rows.heads is None else rows.heads
    itemsize = given.scored_in
    learned = dict(given.learned)
    if rows.heads is not None:
        for name, each in position.learned(work.widths).items():
            dims = learned[name].dims
            at = each.heads or 0
            learned[name] = pick(tape, learned[name], (*dims[:at], heads, *dims[at + 1 :]), heads)
    bias = position.sketched_bias(tape, queries, keys, heads, learned, itemsize)
    if not work.extra:
        return bias
    added = steps.plain(tape, steps.filled(tape, (work.keys,), INTEGER), itemsize=BOOL)
    return steps.hide(tape, bias, Sketch((1, 1, 1, added.dims[0]), BOOL))


def _allowed(tape: Tape, work: Workload, rows: Rows) -> Sketch:
    queries = work.queries if rows.queries is None else rows.queries
    index = Sketch((queries,), INTEGER) if rows.queries is not None else steps.filled(tape, (queries,), INTEGER)
    places = shifted(tape, work, index)
    p = Sketch((places.dims[0], 1, queries, 1), INTEGER)
    j = Sketch((1, 1, 1, work.told_keys), INTEGER)
    steps.filled(tape, (work.told_keys,), INTEGER)
    found = pattern_of(work.spec.masks, work.queries, work.told_keys, work.past).sketched(tape, p, j)
    allowed = Sketch((p.dims[0], 1, queries, work.told_keys), BOOL).stored(found.size)
    return padded(tape, allowed, work.extra) if work.extra else allowed


def _told(tape: Tape, work: Workload, rows: Rows) -> Sketch | None:
    told = own_mask(work)
    if told is None:
        return None
    for dim, count in ((1, rows.heads), (2, rows.queries)):
        if count is not None and told.dims[dim] != 1:
            told = pick(tape, told, (*told.dims[:dim], count, *told.dims[dim + 1 :]), count)
    return padded(tape, told, work.extra) if work.extra else told


def pick(tape: Tape, x: Sketch, dims: tuple[Number, ...], count: Number) -> Sketch:
    """Some entries of a dimension, by their indices."""
    y = Sketch(dims, x.itemsize, tracked=x.tracked)
    tape.does(y.bytes + count * INTEGER, y.bytes)

    def step() -> None:
        tape.does(0, x.bytes)
        tape.does(x.bytes + y.returned + count * INTEGER, x.bytes)
        tape.give(x, x.size)

    return tape.later(y, step) if y.tracked else y

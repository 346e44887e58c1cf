"""Attention as a running state on sketches, step by step: a chunk of each kind, as many times as there are such chunks.

Letters as in ``methods.running``, whose functions these follow.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from attention_service.core import steps
from attention_service.core.methods.running import BLOCK, CHUNK, FINE_CHUNK, Segments
from attention_service.core.tape import BOOL, CUT_ROWS, CUT_SPLIT, INTEGER, ROWS, SPLIT, Number, Sketch, Tape

Piece = tuple[int, int]
"""A length, and how many have it."""


class SketchedFeatures(Protocol):
    """φ of sketches."""

    def sketched_queries(self, tape: Tape, x: Sketch) -> Sketch:
        """``Features.queries``, step by step."""

    def sketched_keys(self, tape: Tape, x: Sketch, real: Sketch | None) -> tuple[Sketch, Sketch | None]:
        """``Features.keys``, step by step."""


@dataclass(frozen=True)
class SketchedTokens:
    """``Tokens`` of sketches."""

    k: Sketch
    v: Sketch
    real: Sketch | None = None
    log_gate: Sketch | None = None
    beta: Sketch | None = None

    def cut(self, tape: Tape, pieces: list[Piece]) -> "list[SketchedTokens]":
        """Into some of each of these lengths."""
        fields = (self.k, self.v, self.real, self.log_gate, self.beta)
        columns = [None if x is None else steps.pieces(tape, x, pieces) for x in fields]
        k, v, *rest = ([None] * len(pieces) if column is None else column for column in columns)
        return [
            SketchedTokens(own_k, own_v, *more)
            for own_k, own_v, *more in zip(k, v, *rest, strict=True)
            if own_k is not None and own_v is not None
        ]


@dataclass(frozen=True)
class SketchedState:
    """``State`` of sketches."""

    value: Sketch
    log_factor: Sketch | None = None


@dataclass(frozen=True)
class SketchedRunning:
    """``Running`` of sketches: one rule of writing and reading."""

    features: SketchedFeatures
    normalize: bool

    def attend(
        self, tape: Tape, q: Sketch, tokens: SketchedTokens, reach: int, state: Sketch | None, *, want_state: bool
    ) -> Sketch:
        """The context."""
        parts = Segments.of(int(q.dims[2]), int(tokens.k.dims[2]), reach)
        blind, paired, late = steps.pieces(tape, q, [(parts.blind, 1), (parts.paired, 1), (parts.late, 1)])
        early, side, rest = tokens.cut(tape, [(parts.early, 1), (parts.paired, 1), (parts.rest, 1)])
        carried = None if state is None else SketchedState(state)
        contexts = list(self._read(tape, blind, carried, tokens.v))
        carried = self._write(tape, carried, early)
        kinds = in_order(parts.paired, _chunk(side))
        if kinds:
            queries, keys = steps.pieces(tape, paired, kinds), side.cut(tape, kinds)
            for index, (_, times) in enumerate(kinds):
                last = index == len(kinds) - 1 and not (parts.late or want_state)
                with tape.repeated(times):
                    found, carried = self._step(tape, queries[index], keys[index], carried, write=not last)
                    if found is not None:
                        contexts.append((self._normalized(tape, found, tokens.v.itemsize), times))
        if want_state:
            carried = self._write(tape, carried, rest)
        contexts += self._read(tape, late, carried, tokens.v)
        return _beside(tape, contexts, (*q.dims[:3], tokens.v.dims[3]), tokens.v.itemsize)

    def _read(self, tape: Tape, q: Sketch, state: SketchedState | None, v: Sketch) -> Iterator[tuple[Sketch, Number]]:
        length = int(q.dims[2])
        if not length:
            return
        if state is None:
            yield steps.filled(tape, (*q.dims[:3], v.dims[3]), v.itemsize), 1
            return
        kinds = in_order(length, BLOCK)
        for block, (_, times) in zip(steps.pieces(tape, q, kinds), kinds, strict=True):
            with tape.repeated(times):
                features = self.features.sketched_queries(tape, steps.cast(tape, block, state.value.itemsize))
                found = steps.product(tape, features, state.value)
                each = self._normalized(tape, found, v.itemsize)
            yield each, times

    def _write(self, tape: Tape, state: SketchedState | None, tokens: SketchedTokens) -> SketchedState | None:
        kinds = in_order(int(tokens.k.dims[2]), BLOCK if tokens.beta is None else _chunk(tokens))
        if not kinds:
            return state
        for block, (_, times) in zip(tokens.cut(tape, kinds), kinds, strict=True):
            with tape.repeated(times):
                _, state = self._step(tape, None, block, state, write=True)
        return state

    def _step(
        self, tape: Tape, q: Sketch | None, tokens: SketchedTokens, state: SketchedState | None, *, write: bool
    ) -> tuple[Sketch | None, SketchedState | None]:
        a = max(tokens.v.itemsize, 4)
        k, log_factor = self.features.sketched_keys(tape, steps.cast(tape, tokens.k, a), tokens.real)
        state, factor = _aligned(tape, state, log_factor)
        k = k if factor is None else steps.multiply(tape, k, factor)
        v = self._written(tape, steps.cast(tape, tokens.v, a))
        faded = None if tokens.log_gate is None else _summed(tape, tokens.log_gate)
        if tokens.beta is not None:
            v = _replaced(tape, k, v, tokens.beta, faded, state)
        steps.filled(tape, (), a)
        found = None
        if q is not None:
            features = self.features.sketched_queries(tape, steps.cast(tape, q, a))
            found = _found(tape, features, k, v, faded, state)
        if not write:
            return found, None
        if faded is None:
            added = steps.outer(tape, k, v)
            value = added if state is None else steps.add(tape, state.value, added)
        else:
            remains = steps.part(tape, faded, (*faded.dims[:2], 1, faded.dims[3]))
            kept = _left(tape, steps.add(tape, remains, faded, minus=True, alike=faded.dims[2] == 1))
            added = steps.outer(tape, steps.multiply(tape, k, kept), v)
            value = added
            if state is not None:
                fades = _left(tape, remains)
                turned = steps.view(tape, fades, (*fades.dims[:2], fades.dims[3], 1))
                value = steps.add(tape, steps.multiply(tape, state.value, turned), added)
        return found, SketchedState(value, state.log_factor if state is not None else log_factor)

    def _written(self, tape: Tape, v: Sketch) -> Sketch:
        if not self.normalize:
            return v
        return steps.cat(tape, [v, steps.filled(tape, (*v.dims[:3], 1), v.itemsize)], 3)

    def _normalized(self, tape: Tape, found: Sketch, itemsize: int) -> Sketch:
        if not self.normalize:
            return steps.cast(tape, found, itemsize)
        total = steps.part(tape, found, (*found.dims[:3], 1))
        values = steps.part(tape, found, (*found.dims[:3], found.dims[3] - 1))
        total = steps.hide(tape, total, steps.plain(tape, total, itemsize=BOOL))
        return steps.cast(tape, steps.divide(tape, values, total), itemsize)


def in_order(length: int, size: int) -> list[Piece]:
    """The first piece of so many tokens, those between, and the last."""
    count = -(-length // size)
    if count < 2:
        return [(length, 1)] if length else []
    between = [(size, count - 2)] if count > 2 else []
    return [(size, 1), *between, (length - (count - 1) * size, 1)]


def _chunk(tokens: SketchedTokens) -> int:
    fine = tokens.log_gate is not None and tokens.log_gate.dims[3] > 1
    return FINE_CHUNK if fine else CHUNK


def _beside(tape: Tape, parts: list[tuple[Sketch, Number]], dims: tuple[Number, ...], itemsize: int) -> Sketch:
    """The context, of so many of each part."""
    whole = Sketch(dims, itemsize, tracked=any(part.tracked for part, _ in parts))
    tape.does(sum(times * part.bytes for part, times in parts), whole.bytes)
    single = len(parts) == 1 and parts[0][1] == 1

    def step() -> None:
        lies = whole.gradient_lies if single else {ROWS: CUT_ROWS, SPLIT: CUT_SPLIT}.get(whole.gradient_lies, ROWS)
        for part, _ in parts:
            tape.give(part, part.size, lies)

    return tape.later(whole, step) if whole.tracked else whole


def _aligned(
    tape: Tape, state: SketchedState | None, log_factor: Sketch | None
) -> tuple[SketchedState | None, Sketch | None]:
    if log_factor is None or state is None or state.log_factor is None:
        return state, None
    larger = steps.plain(tape, state.log_factor, log_factor)
    of_state = steps.plain(tape, steps.plain(tape, state.log_factor, larger), functions=1)
    value = steps.multiply(tape, state.value, of_state)
    return SketchedState(value, larger), steps.plain(tape, steps.plain(tape, log_factor, larger), functions=1)


def _summed(tape: Tape, x: Sketch) -> Sketch:
    """The running sum of a gate's logarithms; back, turned round, summed, and turned round again."""
    y = steps.like(x)
    tape.does(x.bytes, y.bytes)

    def step() -> None:
        if y.dims[2] > 1:
            tape.does(y.returned, y.bytes)
            tape.does(2 * y.bytes, 2 * y.bytes, 0, 2)
        tape.give(x, x.size)

    return tape.later(y, step) if y.tracked else y


def _found(tape: Tape, q: Sketch, k: Sketch, v: Sketch, faded: Sketch | None, state: SketchedState | None) -> Sketch:
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
        q = _each_group(tape, q, _left(tape, faded))
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
    return _left(tape, steps.hide(tape, apart, _ahead(tape, length)))


def _left(tape: Tape, exponents: Sketch) -> Sketch:
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
    left = _left(tape, steps.hide(tape, apart, Sketch((length, length, 1), ahead.itemsize)))
    weighed = steps.multiply(tape, steps.view(tape, k, (batch, kv_heads, 1, length, width)), left)
    weighed = steps.view(tape, weighed, (batch, kv_heads, 1, length, length, width))
    grouped = steps.view(tape, q, (batch, kv_heads, heads / kv_heads, length, 1, width))
    both = steps.multiply(tape, grouped, weighed)
    pairs = steps.total(tape, both, (batch, kv_heads, heads / kv_heads, length, length))
    return steps.view(tape, pairs, (batch, heads, length, length))


def _replaced(
    tape: Tape, k: Sketch, v: Sketch, beta: Sketch, faded: Sketch | None, state: SketchedState | None
) -> Sketch:
    if faded is not None and faded.dims[3] != 1:
        overlap = _pairs_by_feature(tape, k, k, faded)
    else:
        overlap = steps.product(tape, k, k, turned=True)
        if faded is not None:
            overlap = steps.multiply(tape, overlap, _fading(tape, faded))
    if state is not None:
        reading = k if faded is None else steps.multiply(tape, k, _left(tape, faded))
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

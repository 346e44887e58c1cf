"""Attention as a running state on sketches, step by step: a chunk of each kind, as many times as there are such chunks.

Letters as in ``methods.running``, whose functions these follow.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from attention_service.core import steps
from attention_service.core.methods import running_chunk
from attention_service.core.methods.running import BLOCK, CHUNK, FINE_CHUNK, Segments
from attention_service.core.methods.running_chunk import SketchedState
from attention_service.core.tape import BOOL, CUT_ROWS, CUT_SPLIT, ROWS, SPLIT, Number, Sketch, Tape

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
        state, factor = running_chunk.aligned(tape, state, log_factor)
        k = k if factor is None else steps.multiply(tape, k, factor)
        v = self._written(tape, steps.cast(tape, tokens.v, a))
        faded = None if tokens.log_gate is None else running_chunk.summed(tape, tokens.log_gate)
        if tokens.beta is not None:
            v = running_chunk.replaced(tape, k, v, tokens.beta, faded, state)
        steps.filled(tape, (), a)
        found = None
        if q is not None:
            features = self.features.sketched_queries(tape, steps.cast(tape, q, a))
            found = running_chunk.read(tape, features, k, v, faded, state)
        if not write:
            return found, None
        if faded is None:
            added = steps.outer(tape, k, v)
            value = added if state is None else steps.add(tape, state.value, added)
        else:
            remains = steps.part(tape, faded, (*faded.dims[:2], 1, faded.dims[3]))
            kept = running_chunk.left(tape, steps.add(tape, remains, faded, minus=True, alike=faded.dims[2] == 1))
            added = steps.outer(tape, steps.multiply(tape, k, kept), v)
            value = added
            if state is not None:
                fades = running_chunk.left(tape, remains)
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

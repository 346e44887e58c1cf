"""What is done in many equal pieces, rehearsed with a few of them: each of the others adds what the last one did."""

from collections.abc import Callable
from dataclasses import replace

from attention_service.core.additive import BLOCK as HIDDEN
from attention_service.core.blocks import rows_at_once
from attention_service.core.cost.approximate import approximated, method_cost, reach_in
from attention_service.core.cost.pairs import request_mask, score_cost
from attention_service.core.cost.workload import Workload
from attention_service.core.methods.running import BLOCK, CHUNK, FINE_CHUNK, Segments

_FEW = 6
"""Pieces that are rehearsed, and one less."""


def by_pieces(work: Workload, rehearse: Callable[[Workload], dict[str, int]]) -> dict[str, int]:
    """The bytes that are told of a workload by phase; of one in many pieces, by what is told of shorter ones."""
    pieces = in_pieces(work)
    if pieces is None:
        return rehearse(work)
    unit, more = pieces
    few, fewer = (rehearse(_shorter(work, each * unit)) for each in (more, more + 1))
    return {phase: size + more * (size - fewer[phase]) for phase, size in few.items()}


def in_pieces(work: Workload) -> tuple[int, int] | None:
    """Queries of a piece, and how many pieces there are beyond the few that are rehearsed; None where all of it is."""
    unit = _unit(work)
    shared = work.queries if approximated(work) is None else min(work.queries, work.new_keys)
    more = 0 if unit is None else shared // unit - _FEW
    return None if unit is None or more < _FEW else (unit, more)


def _unit(work: Workload) -> int | None:
    """Queries of a piece, of which all but the first and the last few do and hold the same; None for no pieces."""
    if approximated(work) is not None:
        paired = Segments.of(work.queries, work.keys, reach_in(work)).paired
        unit = (FINE_CHUNK if work.fine_gate else CHUNK) if paired else BLOCK
        steps = method_cost(_shorter(work, unit)).steps if min(work.queries, work.new_keys) > unit else 0
        return unit if 0 < steps < method_cost(work).steps else None
    units = [rows_at_once(work.batch, work.heads, work.keys)] if work.dropped else []
    if layer := score_cost(work).layer:
        each = max(1, work.batch * work.heads * layer)
        units.append(max(1, HIDDEN // (each * max(1, min(work.keys, HIDDEN // each)))))
    return max(units, default=None)


def _shorter(work: Workload, tokens: int) -> Workload:
    """With so many queries less; where an approximation takes them together, as many keys less."""
    if approximated(work) is not None:
        return replace(work, queries=work.queries - tokens, keys=work.keys - tokens)
    rows = request_mask(work) if work.request_mask_elements else (0, 0, 0)
    of_rows = work.request_mask_elements // work.queries if rows[2] == work.queries else 0
    fewer = work.at("queries", work.queries - tokens)
    return replace(fewer, request_mask_elements=work.request_mask_elements - of_rows * tokens)

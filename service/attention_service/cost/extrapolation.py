"""Extrapolation of work in many equal pieces from a few of them: each further piece adds as much as the last."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from attention_service.core.methods.recurrence import BLOCK, CHUNK, FINE_CHUNK
from attention_service.core.methods.recurrence_cost import segments_of
from attention_service.core.scores.additive_sums import BLOCK as HIDDEN
from attention_service.cost.approximate import approximated, method_cost
from attention_service.cost.pairs import request_mask, score_cost
from attention_service.cost.rehearsal import LARGEST, Bytes
from attention_service.cost.tensor_bytes import input_bytes
from attention_service.cost.workload import Workload

_FEW = 12
"""Pieces that are rehearsed, and one less."""
_LONG = 2**17
"""Larger sizes are extrapolated from three smaller ones."""
_SLACK = 0.01


def by_pieces(
    work: Workload, rehearse: Callable[[Workload], dict[str, Bytes]], *, twice: bool = False
) -> dict[str, Bytes]:
    """Rehearse a workload by phase; extrapolate one in many pieces from shorter ones.

    ``twice``: gradients are differentiated again, and something is kept of each piece of the hidden layer of a score.
    """
    tokens = ("length",) if work.queries == work.new_keys else ("queries", "keys")
    for dimension in ("batch", "past", *tokens):
        if work.value(dimension) > _LONG and (approximated(work) is None or input_bytes(work) > LARGEST):
            return _grown(work, dimension, partial(by_pieces, rehearse=rehearse, twice=twice))
    pieces = in_pieces(work, twice=twice)
    if pieces is None:
        return rehearse(work)
    unit, more = pieces
    few, fewer = (rehearse(_shorter(work, each * unit)) for each in (more, more + 1))
    return {phase: _longer(held, fewer[phase], more) for phase, held in few.items()}


def _longer(few: Bytes, fewer: Bytes, more: int) -> Bytes:
    """With so many more pieces; by tensor where the same ones are held."""
    found = {name: size + more * (size - fewer.get(name, 0)) for name, size in few.items()}
    if fewer.keys() <= found.keys() and min(found.values(), default=0) >= 0:
        return found
    whole = sum(few.values())
    return {"workspace": whole + more * (whole - sum(fewer.values()))}


def _grown(work: Workload, dimension: str, rehearse: Callable[[Workload], dict[str, Bytes]]) -> dict[str, Bytes]:
    """Extrapolate quadratically from n, 2n and 4n.

    If the three do not lie on such a curve, because the last size takes another path, scale linearly.
    """
    sizes = [_LONG // 4, _LONG // 2, _LONG]
    low, middle, high = (rehearse(_resized(work, dimension, size)) for size in sizes)
    steps = work.value(dimension) / sizes[0]

    def at(first: int, second: int, third: int) -> int:  # at 1, 2 and 4
        early, late = second - first, third - second
        if not 2 * early * (1 - _SLACK) <= late <= 4 * early * (1 + _SLACK):
            return round(third * (steps / 4 if late > 0 else 1))
        square = ((third - second) / 2 - (second - first)) / 3
        line = second - first - 3 * square
        return round(first + line * (steps - 1) + square * (steps**2 - 1))

    return {
        phase: {name: max(0, at(*(each[phase].get(name, 0) for each in (low, middle, high)))) for name in held}
        for phase, held in high.items()
    }


def _resized(work: Workload, dimension: str, size: int) -> Workload:
    """With a request's mask as much larger or smaller as it is."""
    smaller = replace(work.at(dimension, size), inputs=work.inputs)
    if not work.request_mask_elements:
        return smaller
    batch, heads, queries = request_mask(work)
    columns = work.request_mask_elements // max(1, batch * heads * queries)
    rows = (1 if batch == 1 else smaller.batch) * heads * (1 if queries == 1 else smaller.queries)
    return replace(smaller, request_mask_elements=rows * (1 if columns == 1 else smaller.sequence_keys))


def in_pieces(work: Workload, *, twice: bool = False) -> tuple[int, int] | None:
    """Queries of a piece, and how many pieces there are beyond the few that are rehearsed; None where all of it is."""
    unit = _unit(work, twice=twice)
    shared = work.queries if approximated(work) is None else min(work.queries, work.new_keys)
    more = 0 if unit is None else shared // unit - _FEW
    return None if unit is None or more < _FEW else (unit, more)


def _unit(work: Workload, *, twice: bool) -> int | None:
    """Queries of a piece, of which all but the first and the last few do and hold the same; None for no pieces.

    An approximation that is compared with exact attention is rehearsed as a whole: what is compared grows with the
    square of the length, up to a block.
    """
    if work.reported:
        return None
    if approximated(work) is not None:
        paired = segments_of(work).paired
        unit = (FINE_CHUNK if work.fine_gate else CHUNK) if paired else BLOCK
        steps = method_cost(_shorter(work, unit)).steps if min(work.queries, work.new_keys) > unit else 0
        return unit if 0 < steps < method_cost(work).steps else None
    layer = score_cost(work).layer
    if not layer or not twice:
        return None
    each = max(1, work.batch * work.heads * layer)
    return max(1, HIDDEN // (each * max(1, min(work.keys, HIDDEN // each))))


def _shorter(work: Workload, tokens: int) -> Workload:
    """With so many queries less; where an approximation takes them together, as many keys less."""
    if approximated(work) is not None:
        return replace(work, queries=work.queries - tokens, keys=work.keys - tokens)
    rows = request_mask(work) if work.request_mask_elements else (0, 0, 0)
    of_rows = work.request_mask_elements // work.queries if rows[2] == work.queries else 0
    fewer = replace(work, queries=work.queries - tokens)
    return replace(fewer, request_mask_elements=work.request_mask_elements - of_rows * tokens)

"""Rehearsals: the operation of a blank request launched on meta tensors, which tells what it holds and does.

Of work in many equal pieces a few are rehearsed, and each further one adds as much as the last.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from attention_service.core.kernels import KERNELS, Kernel
from attention_service.core.methods import approximation_of
from attention_service.core.methods.recurrence import BLOCK, CHUNK, FINE_CHUNK
from attention_service.core.methods.recurrence_cost import segments_of
from attention_service.core.scores.additive_sums import BLOCK as HIDDEN
from attention_service.cost.pairs import score_cost
from attention_service.cost.rehearsal import LARGEST, Bytes, Seen, rehearse
from attention_service.cost.tensor_bytes import input_bytes
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.planning.blank_requests import META, at_sizes, long_enough, sizes_of


class Launched(Protocol):
    """The part of an operation that a rehearsal needs."""

    def upload(self, device: torch.device) -> Any:
        """Make the request's tensors on a device."""

    def launch(self, uploaded: Any) -> object:
        """Compute the results."""


Operate = Callable[[BoundRequest, Kernel | str], Launched]
"""Makes the operation over a blank request, by a kernel or the method of this name."""

_REHEARSED_PIECES = 12
"""Pieces that are rehearsed, and one less."""
_LONG = 2**17
"""Larger sizes are extrapolated from three smaller ones."""
_SLACK = 0.01


def seen(
    bound: BoundRequest,
    kernel: str,
    operate: Operate,
    *,
    twice: bool = False,
    whole: bool = False,
    first: str = "inputs",
    smaller: Callable[[BoundRequest], Seen] | None = None,
) -> Seen:
    """Rehearse the operation over a blank request.

    twice: gradients are differentiated again, and something is kept of each piece of the hidden layer of a score.
    ``whole``: pieces are not alike. ``first``: the name of the first phase. ``smaller``: rehearses the sizes from which
    a large one is extrapolated, if they are remembered.
    """
    once = partial(_once, kernel=kernel, operate=operate, first=first)
    return once(bound) if whole else _in_pieces(long_enough(bound), once, twice=twice, smaller=smaller)


def _once(bound: BoundRequest, *, kernel: str, operate: Operate, first: str) -> Seen:
    by = KERNELS[kernel].make().rehearsal(bound) if kernel in KERNELS else kernel
    operation = operate(bound, by)
    resident = () if bound.module is None else bound.module.parameters.values()
    return rehearse(
        lambda: operation.launch(operation.upload(META)),
        resident,
        pairs=(bound.queries, bound.keys),
        threads=bound.threads,
        first=first,
    )


def _in_pieces(
    bound: BoundRequest,
    once: Callable[[BoundRequest], Seen],
    *,
    twice: bool,
    smaller: Callable[[BoundRequest], Seen] | None = None,
) -> Seen:
    tokens = ("length",) if bound.queries == bound.new_keys else ("queries", "new_keys")
    for dimension in ("batch", "past", *tokens):
        size = bound.queries if dimension == "length" else getattr(bound, dimension)
        if size > _LONG and (approximation_of(bound.spec) is None or input_bytes(bound) > LARGEST):
            return _grown(bound, dimension, size, smaller or partial(_in_pieces, once=once, twice=twice))
    unit = _unit(bound, twice=twice)
    shared = bound.queries if approximation_of(bound.spec) is None else min(bound.queries, bound.new_keys)
    more = 0 if unit is None else shared // unit - _REHEARSED_PIECES
    if unit is None or more < _REHEARSED_PIECES:
        return once(bound)
    few, fewer = (once(_shorter(bound, units * unit)) for units in (more, more + 1))
    sections = {at: x + (x - fewer.sections[at]).times(more) for at, x in few.sections.items() if at in fewer.sections}
    phases = {phase: _longer(held, fewer.phases[phase], more) for phase, held in few.phases.items()}
    return Seen(phases, sections, few.results + more * (few.results - fewer.results))


def _longer(few: Bytes, fewer: Bytes, more: int) -> Bytes:
    """With so many more pieces; by tensor where the same ones are held."""
    bytes_by_name = {name: size + more * (size - fewer.get(name, 0)) for name, size in few.items()}
    if fewer.keys() <= bytes_by_name.keys() and min(bytes_by_name.values(), default=0) >= 0:
        return bytes_by_name
    whole = sum(few.values())
    return {"workspace": whole + more * (whole - sum(fewer.values()))}


def _grown(bound: BoundRequest, dimension: str, size: int, at: Callable[[BoundRequest], Seen]) -> Seen:
    """Extrapolate quadratically from n, 2n and 4n.

    If the three do not lie on such a curve, because the last size takes another path, scale linearly.
    """
    few = [_LONG // 4, _LONG // 2, _LONG]
    low, middle, high = (at(_resized(bound, dimension, sample_size)) for sample_size in few)
    steps = size / few[0]

    def far(first: int, second: int, third: int) -> int:  # at 1, 2 and 4
        early, late = second - first, third - second
        if not 2 * early * (1 - _SLACK) <= late <= 4 * early * (1 + _SLACK):
            return round(third * (steps / 4 if late > 0 else 1))
        square = ((third - second) / 2 - (second - first)) / 3
        line = second - first - 3 * square
        return round(first + line * (steps - 1) + square * (steps**2 - 1))

    phases = {
        phase: {
            name: max(0, far(*(rehearsed.phases[phase].get(name, 0) for rehearsed in (low, middle, high))))
            for name in held
        }
        for phase, held in high.phases.items()
    }
    sections = {
        section: type(counts)(
            *(
                far(*x)
                for x in zip(*(rehearsed.sections[section].numbers for rehearsed in (low, middle, high)), strict=True)
            )
        )
        for section, counts in high.sections.items()
    }
    return Seen(phases, sections, far(low.results, middle.results, high.results))


def _resized(bound: BoundRequest, dimension: str, size: int) -> BoundRequest:
    """With one size changed; ``length`` is queries and new keys."""
    sizes = sizes_of(bound)
    changed = dict.fromkeys(("queries", "new_keys") if dimension == "length" else (dimension,), size)
    return at_sizes(bound, sizes.with_tokens(**changed))


def _shorter(bound: BoundRequest, tokens: int) -> BoundRequest:
    """With so many queries less; where an approximation takes them together, as many keys less."""
    sizes = sizes_of(bound)
    if approximation_of(bound.spec) is None:
        return at_sizes(bound, sizes.with_tokens(queries=sizes.queries - tokens))
    return at_sizes(bound, sizes.with_tokens(queries=sizes.queries - tokens, new_keys=sizes.new_keys - tokens))


def _unit(bound: BoundRequest, *, twice: bool) -> int | None:
    """Queries of a piece, of which all but the first and the last few do and hold the same; None for no pieces."""
    method = approximation_of(bound.spec)
    if method is not None:
        paired = segments_of(bound).paired
        unit = (FINE_CHUNK if bound.fine_gate else CHUNK) if paired else BLOCK
        steps = method.cost(_shorter(bound, unit)).steps if min(bound.queries, bound.new_keys) > unit else 0
        return unit if 0 < steps < method.cost(bound).steps else None
    layer = score_cost(bound).layer
    if not layer or not twice:
        return None
    row_pairs = max(1, bound.batch * bound.heads * layer)
    return max(1, HIDDEN // (row_pairs * max(1, min(bound.keys, HIDDEN // row_pairs))))

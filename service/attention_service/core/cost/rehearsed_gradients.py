"""Peak memory of gradients beyond the plain ones, rehearsed: of edited attention, of second order, with a check.

What of a graph is freed when is a matter of the order in which it is gone through, and of a graph of a graph more so.
What is done in many equal pieces is rehearsed with a few of them.
"""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from attention_service.core.additive import BLOCK as HIDDEN
from attention_service.core.attention import attend
from attention_service.core.blocks import rows_at_once
from attention_service.core.cost.approximate import approximated, method_cost, reach_in
from attention_service.core.cost.gradient_memory import gradient_peak_bytes
from attention_service.core.cost.pairs import request_mask, score_cost
from attention_service.core.cost.phases import ROUNDING
from attention_service.core.cost.rehearsal import most_held
from attention_service.core.cost.stand_ins import (
    Graph,
    Tensors,
    edits_of,
    graph_of,
    inputs_of,
    output_of,
    parameters_of,
    problem_of,
)
from attention_service.core.cost.workload import Workload
from attention_service.core.edits import BoundEdit
from attention_service.core.methods.running import BLOCK, CHUNK, FINE_CHUNK, Segments
from attention_service.core.pullback import pullback
from attention_service.core.stages import TAPS
from attention_service.core.types import Selection

_LARGEST = 2**46
"""Bytes that no device has. Of what needs more only that is told, and nothing of such sizes is rehearsed."""
_FEW = 6
"""Pieces that are rehearsed, and one less: what there is more of them adds what the last one did."""


def rehearsed_gradient_bytes(
    work: Workload, names: Collection[str], *, twice: bool = False, checked: bool = False, room: int = _LARGEST
) -> int:
    """The most that gradients with respect to these names hold at a time, with the materialized kernel or by a method.

    ``twice``: they are differentiated again, along a direction of each; ``checked``: held against central differences
    in float64. Where plain gradients alone need more than ``room``, in bytes, that is told: it is known at once.
    """
    plain = gradient_peak_bytes(work, taps=bool({*names} & {*TAPS}), kernel="materialized", mask="mask" in names)
    if plain > min(room, _LARGEST):
        return plain
    pieces = in_pieces(work)
    if pieces is None:
        return rehearsed(work, names, twice=twice, checked=checked)
    unit, more = pieces
    few, fewer = (
        rehearsed(_shorter(work, each * unit), names, twice=twice, checked=checked) for each in (more, more + 1)
    )
    return few + more * (few - fewer)


def rehearsed(work: Workload, names: Collection[str], *, twice: bool = False, checked: bool = False) -> int:
    """The same, all of it gone through."""
    return _Rehearsal(work, names, twice, checked).bytes


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


class _Rehearsal:
    """The gradients of one request, step by step as they are answered."""

    def __init__(self, work: Workload, names: Collection[str], twice: bool, checked: bool) -> None:
        self._work, self._names, self._twice, self._checked = work, names, twice, checked
        self._resident = parameters_of(work) if work.sizes is not None else {}
        self.bytes = most_held(self._run, self._resident.values()) + ROUNDING

    def _run(self) -> None:
        work = self._work
        graph, upstream = self._graph(work)
        found = _gradients(graph, upstream, again=self._twice)
        if self._twice:
            along = graph.output.new_zeros(())
            for x in found:
                along = along + (x * torch.empty_like(x)).sum()
            if along.requires_grad:
                found += _gradients(Graph(along, graph.at), torch.ones_like(along), again=False)
        inner = work.taps - {"output"}
        again = None
        if inner or work.dropped:
            with torch.no_grad():
                problem = problem_of(work, inputs_of(work), self._parameters(work))
                taps = attend(problem, inner, _selection(work), edits_of(work), "materialized").taps if inner else {}
            again = problem, taps
        if self._checked:
            self._check()
        del graph, upstream, found, again  # all of it stays to the end

    def _graph(self, work: Workload) -> tuple[Graph, Tensor]:
        graph = graph_of(work, self._names, inputs_of(work), self._parameters(work))
        return graph, torch.ones_like(graph.output)

    def _parameters(self, work: Workload) -> Tensors:
        return self._resident if self._resident and work.itemsize == self._work.itemsize else parameters_of(work)

    def _check(self) -> None:
        """Once more in float64; then, for a name at a time, what a number of it changes."""
        normalizer = self._work.spec.normalizer.model_copy(update={"dtype": "float64"})
        spec = self._work.spec.model_copy(update={"normalizer": normalizer})
        work = replace(self._work, itemsize=8, spec=spec)
        graph, upstream = self._graph(work)
        found = _gradients(graph, upstream, again=False)
        tensors, parameters = inputs_of(work), self._parameters(work)
        beside = {name: (1 if x.is_contiguous() else 2) * x.numel() for name, x in zip(graph.at, found, strict=True)}
        largest = max((name for name in beside if name not in TAPS), key=beside.__getitem__, default=None)
        with torch.no_grad():
            for (name, x), gradient in zip(graph.at.items(), found, strict=True):
                if name in TAPS or name == largest:
                    flat = gradient.flatten()
                    flat.abs()
                    _probe(work, name, x.detach(), tensors, parameters, upstream)
                    del flat


def _gradients(graph: Graph, upstream: Tensor, *, again: bool) -> list[Tensor]:
    at = [*graph.at.values()]
    if not graph.output.requires_grad:
        return [torch.zeros_like(x) for x in at]
    return pullback(graph.output, at, upstream, again=again)


def _probe(work: Workload, name: str, at: Tensor, tensors: Tensors, parameters: Tensors, upstream: Tensor) -> None:
    """The output where one number was moved, beside that where it was moved the other way."""
    moved = at.flatten().clone().view_as(at)
    edits = edits_of(work)
    before = torch.empty_like(upstream)
    moved.clone()  # the next one, before this is gone
    changed = [*edits, BoundEdit(name, value=moved)] if name in TAPS else edits
    inputs = {each: moved if each == name else x for each, x in tensors.items()}
    held = {each: moved if each == name else x for each, x in parameters.items()}
    context = attend(problem_of(work, inputs, held), (), Selection(), changed, "materialized").context
    output = output_of(work, held, context, edits)
    del context
    (upstream * (before - output)).sum()


def _selection(work: Workload) -> Selection:
    heads, queries = (
        None if count is None else tuple(range(count)) for count in (work.selected_heads, work.selected_queries)
    )
    return Selection(heads, queries)

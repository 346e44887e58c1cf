"""Gradients gone through on the meta device, as a server answers them."""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from attention_service.core.attention import attend
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels.materialized import MATERIALIZED
from attention_service.core.pullback import pullback
from attention_service.core.stages import TAPS
from attention_service.core.types import Selection
from attention_service.cost.forward_rehearsal import answered
from attention_service.cost.kernels import kernel_of
from attention_service.cost.rehearsal import Account, Bytes, most_held
from attention_service.cost.stand_ins import (
    Graph,
    Tensors,
    edits_of,
    graph_of,
    inputs_of,
    output_of,
    parameters_of,
    problem_of,
    selection_of,
)
from attention_service.cost.workload import Workload, remembered


@remembered
def rehearsed(work: Workload, kernel: str, names: tuple[str, ...], twice: bool, checked: bool) -> dict[str, Bytes]:
    """What is held in each phase of the gradients with respect to these names, as they are answered.

    By a kernel or, whatever it is called, a method. ``twice``: they are differentiated again, along a direction of
    each; ``checked``: held against central differences in float64.
    """
    return _Rehearsal(work, kernel, names, twice, checked).phases


class _Rehearsal:
    """The gradients of one request, step by step."""

    def __init__(self, work: Workload, kernel: str, names: Collection[str], twice: bool, checked: bool) -> None:
        self._work, self._kernel, self._names, self._twice, self._checked = work, kernel, names, twice, checked
        self._resident = parameters_of(work) if work.sizes is not None else {}
        self.phases = most_held(
            self._run, self._resident.values(), pairs=(work.queries, work.keys), threads=work.threads
        )

    def _run(self, account: Account) -> None:
        work = self._work
        account.begin("attention")
        graph, upstream = self._graph(account, work, self._kernel)
        account.begin("backward of attention")
        account.call("gradients", "of_pairs")
        found = _gradients(graph, upstream, again=self._twice)
        if self._twice:
            account.begin("second gradients")
            along = graph.output.new_zeros(())
            for x in found:
                along = along + (x * torch.empty_like(x)).sum()
            if along.requires_grad:
                found += _gradients(Graph(along, graph.at), torch.ones_like(along), again=False)
        inner = work.taps - {"output"}
        again = None
        if inner or work.dropped:
            account.begin("taps again")
            account.call("taps")
            with torch.no_grad():
                problem = problem_of(work, inputs_of(work), self._parameters(work))
                by = kernel_of(work, self._kernel).rehearsal(work, account.take)
                taps = attend(problem, inner, selection_of(work), edits_of(work), by).taps if inner else {}
            again = problem, taps, [answered(work, x) for x in taps.values()]
        if self._checked:
            account.begin("check")
            self._check(account)
        del graph, upstream, found, again  # all of it stays to the end

    def _graph(self, account: Account, work: Workload, kernel: str) -> tuple[Graph, Tensor]:
        account.call("inputs")
        tensors, parameters = inputs_of(work), self._parameters(work)
        graph = graph_of(work, self._names, tensors, parameters, account, kernel)
        account.call("upstream")
        return graph, torch.ones_like(graph.output)

    def _parameters(self, work: Workload) -> Tensors:
        return self._resident if self._resident and work.itemsize == self._work.itemsize else parameters_of(work)

    def _check(self, account: Account) -> None:
        """Once more in float64; then, for a name at a time, what a number of it changes."""
        normalizer = self._work.spec.normalizer.model_copy(update={"dtype": "float64"})
        spec = self._work.spec.model_copy(update={"normalizer": normalizer})
        work = replace(self._work, itemsize=8, spec=spec)
        graph, upstream = self._graph(account, work, MATERIALIZED)
        account.call("gradients", "of_pairs")
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
    context = attend(problem_of(work, inputs, held), (), Selection(), changed, MATERIALIZED).context
    output = output_of(work, held, context, edits)
    del context
    (upstream * (before - output)).sum()

"""Inspection: what each head looks at. Statistics over the real queries, top keys, the weights themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention_contract.schemas.weights import NEEDS_NEEDLE, WeightsRequest
from attention_service.core.attention import has_implicit_weights, with_implicit_weights
from attention_service.core.blocks import tiles
from attention_service.core.edits import BoundEdit
from attention_service.core.inspection.weights import (
    TiledWeights,
    Weights,
    pooled_differences,
    pooled_magnitudes,
    pooled_weights,
    positions_of,
    real_queries,
    top,
    totals,
    weights_of,
)
from attention_service.core.kernels import Kernel, Needs
from attention_service.core.nonfinite_keys import find_nonfinite_keys
from attention_service.core.problem import Problem, Selection
from attention_service.core.slices import phase
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound_request import BoundRequest, wrong_shape
from attention_service.runtime.binding.bound_statistics import (
    BoundStatistics,
    bind_statistics,
    check_able,
    check_sink_mass,
)
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.binding.selection import (
    bind_selection,
    check_edits,
    check_labels,
    check_tap,
)
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import compute
from attention_service.runtime.operations.forward import joining_of
from attention_service.runtime.planning.planner import (
    Question,
    Rehearsed,
    edit_sizes,
    names_tokens,
    plan_request,
    selection_sizes,
)
from attention_service.runtime.scheduling.batches import joinable
from attention_service.runtime.scheduling.jobs import Job, Prepared, job_of_request
from attention_service.runtime.scheduling.operation import Fields, Operation, Results, Uploaded, on_host


def prepare(module: Module | None, request: WeightsRequest, device: Device, capacity: int) -> Job:
    """Bind and plan one inspection. Raises an InvalidRequest that names the field at fault."""
    return job_of_request(_planned, bind(module, request), request, device, capacity)


def _planned(bound: BoundRequest, request: WeightsRequest, device: Device, capacity: int) -> Prepared:
    check_tap("weights", bound.spec, "spec.method")
    selection = bind_selection(request.select, bound)
    query_mask = request.query_mask
    if query_mask is not None:
        expected = (bound.batch, bound.queries) if bound.layout.batched else (bound.queries,)
        if query_mask.shape != expected:
            raise wrong_shape("query_mask", f"shape {list(expected)}", query_mask, list(expected))
    check_labels(request, bound)
    check_edits(request.edits, bound)
    sinks = getattr(bound.spec.normalizer, "sinks", False)
    check_able(request.statistics, NEEDS_NEEDLE | {"sink_mass"} if sinks else NEEDS_NEEDLE)
    check_sink_mass(request.statistics, request.edits)
    statistics = bind_statistics(
        request.statistics, request.statistic_options,
        batch=bound.batch, queries=bound.queries, keys=bound.keys - bound.added_keys, learned_sinks=sinks,
        normalize=request.normalize, implicit=has_implicit_weights(bound.spec),
    )  # fmt: skip
    plain = all(each is None for each in (request.statistics, request.compare, request.pool, request.normalize))
    question = Question(
        "weights",
        kernel=request.kernel,
        needs=Needs(edits=bool(request.edits), taps_gradient=True),
        asks=(
            request.top_k, request.return_weights, request.average_heads, request.pool, request.compare,
            query_mask is not None, None if request.statistics is None else tuple(request.statistics),
            request.normalize, selection_sizes(selection), edit_sizes(request.edits),
        ),
        has_sizes=not plain or names_tokens(request.edits, selection),
        pairs=has_implicit_weights(bound.spec),
    )  # fmt: skip

    def operate(bound: BoundRequest, kernel: str | Kernel = "") -> Inspection:
        return Inspection(bound, request, selection, statistics)

    plan = plan_request(bound, question, device, capacity, Rehearsed(operate))
    joining = None
    if query_mask is None and plain and not request.edits and joinable(bound):
        joining = joining_of(bound, question, selection, plan.kernel, device, Rehearsed(operate))
    return Prepared("weights", plan, bound.dtype, device.torch, operate, joining=joining)


@dataclass(eq=False, slots=True)
class Inspection(Operation):
    """Statistics of the weights, the top keys and the weights themselves, of one request or of several stacked."""

    bound: BoundRequest
    request: WeightsRequest
    selection: Selection
    statistics: BoundStatistics = field(default_factory=BoundStatistics)
    before: Problem | None = None
    """The attention without the edits, if these changed its queries and keys too."""
    with_context: bool = False
    """True if the results have the ``context`` ``[B, H, Q, V]`` too."""

    def upload(self, device: torch.device) -> Uploaded:
        """Copy the inputs and the query mask to the device."""
        uploaded = compute.upload(self.bound, device, self.request.edits)
        if self.request.query_mask is not None:
            shape = self.bound.batch, self.bound.queries
            mask = compute.placed(self.request.query_mask, "query_mask", device, torch.bool, shape)
            uploaded.tensors["query_mask"] = mask
        return uploaded

    def launch(self, uploaded: Uploaded) -> Results:
        """Compute the weights block by block."""
        bound, request = self.bound, self.request
        mask = uploaded.tensors.pop("query_mask", None)
        phase("project", "roles")
        problem = compute.problem(bound, uploaded.tensors, uploaded.parameters)
        uploaded.tensors.clear()
        phase("statistics", "weights")
        if not problem.finite and not uploaded.edits and find_nonfinite_keys(problem) is None:
            problem = replace(problem, finite=True)  # tiles need not look again
        problem, before = self._with_weights(problem, uploaded.edits)
        real = real_queries(problem) if mask is None else mask
        keep = request.return_weights and self.selection == Selection()
        tiled = TiledWeights(problem, uploaded.edits, keep=keep, with_context=self.with_context)
        weights_by: Weights = tiled.read if keep else partial(weights_of, problem, edits=uploaded.edits)
        statistics = self.statistics
        inputs = statistics.inputs(problem.q.device, positions_of(problem))
        everything = tiles(problem, Selection())
        found = totals(problem, real, everything, tiled.compute, statistics.names, inputs)
        means = found.means()
        results: Results = {"statistics": self._in_reply(means), "queries": compute.in_reply(found.queries, bound)}
        pools = pooled_magnitudes if problem.implicit else pooled_weights
        if tiled.context is not None:
            results["context"] = tiled.context
        unedited = None
        if request.compare is not None:
            unedited = partial(weights_of, before)
            without = totals(problem, real, everything, TiledWeights(before).compute, statistics.names, inputs).means()
            results["differences"] = {"statistics": self._in_reply(_minus(means, without))}
        if request.top_k:
            phase("top", "weights")
            weights, keys = top(problem, self.selection, min(request.top_k, bound.keys), weights_by)
            results["top"] = {
                "keys": compute.in_reply(keys, bound, "weights"),
                "weights": compute.in_reply(weights, bound, "weights"),
            }
        if request.pool is not None:
            phase("weights", "weights")
            pooled = pools(problem, self.selection, request.pool, weights_by)
            results["pooled"] = compute.in_reply(pooled, bound, "weights")
            if unedited is not None:
                changed = pooled_differences(problem, self.selection, request.pool, weights_by, unedited)
                results["differences"]["pooled"] = compute.in_reply(changed, bound, "weights")
        if request.return_weights:
            phase("weights", "weights")
            weights = tiled.whole if keep else weights_by(self.selection)
            results |= compute.tap_results(bound, {"weights": weights}, average_heads=request.average_heads)
            if unedited is not None:
                moved = {"weights": weights - unedited(self.selection)}
                results["differences"] |= compute.tap_results(bound, moved, average_heads=request.average_heads)
        return results

    def _with_weights(self, problem: Problem, edits: Sequence[BoundEdit]) -> tuple[Problem, Problem]:
        """The attention with its implicit weights, if it has these, and the same without the edits."""
        before = problem if self.before is None else self.before
        if not self.statistics.implicit:
            return problem, before
        if problem.given is not None:
            return replace(problem, implicit=True), replace(before, implicit=True)
        found = with_implicit_weights(problem, edits)
        moved = self.request.compare is not None and any(edit.tap in {"q", "k"} for edit in edits)
        return found, with_implicit_weights(before) if moved else found

    def collect(self, results: Results) -> Fields:
        """Copy the results to the host."""
        return on_host(results) | ({"implicit": True} if has_implicit_weights(self.bound.spec) else {})

    def _in_reply(self, means: Mapping[str, Any]) -> Results:
        """Statistics ``[B, H]`` in the reply's layout and in at least float32."""
        dtype = "float64" if self.bound.dtype == "float64" else "float32"
        return {
            name: self._in_reply(mean)
            if isinstance(mean, Mapping)
            else compute.in_reply(mean, self.bound, "weights", dtype)
            for name, mean in means.items()
        }


def _minus(edited: Mapping[str, Any], unedited: Mapping[str, Any]) -> dict[str, Any]:
    """Subtract statistics by name."""
    return {
        name: mean - unedited[name] if isinstance(mean, Tensor) else _minus(mean, unedited[name])
        for name, mean in edited.items()
    }

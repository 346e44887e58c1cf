"""Inspection: what each head looks at. Statistics over the real queries, top keys, the weights themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention_contract.schemas.weights import NEEDS_NEEDLE, NEEDS_PAIRS, WeightsRequest
from attention_service.core.attention import has_implicit_weights, with_implicit_weights
from attention_service.core.blocks import tiles
from attention_service.core.edits import BoundEdit
from attention_service.core.inspection.average_product import with_correction
from attention_service.core.inspection.statistics import statistics_of
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
from attention_service.core.nonfinite_keys import finite_part
from attention_service.core.problem import Problem, Selection
from attention_service.core.slices import phase
from attention_service.core.tensors import constant, pick
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound_request import BoundRequest, wrong_shape
from attention_service.runtime.binding.bound_statistics import (
    BoundStatistics,
    bind_statistics,
    check_able,
    check_unspoiled,
)
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.binding.selection import (
    bind_keys,
    bind_selection,
    check_edits,
    check_labels,
    check_tap,
)
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import compute
from attention_service.runtime.operations.forward import joining_of
from attention_service.runtime.planning.planner import (
    PlanKey,
    Rehearsed,
    edit_sizes,
    names_tokens,
    plan_request,
    selection_sizes,
)
from attention_service.runtime.scheduling.batches import joinable
from attention_service.runtime.scheduling.jobs import Job, Prepared, job_of_request
from attention_service.runtime.scheduling.operation import DeviceOperation, Fields, Results, Uploaded, on_host


def prepare(module: Module | None, request: WeightsRequest, device: Device, capacity: int) -> Job:
    """Bind and plan one inspection. Raises an InvalidRequest that names the field at fault."""
    return job_of_request(_planned, bind(module, request), request, device, capacity)


def _planned(bound: BoundRequest, request: WeightsRequest, device: Device, capacity: int) -> Prepared:
    check_tap("weights", bound.spec, "spec.method")
    selection, keys = bind_selection(request.select, bound), bind_keys(request.select, bound)
    query_mask = request.query_mask
    if query_mask is not None:
        expected = (bound.batch, bound.queries) if bound.layout.batched else (bound.queries,)
        if query_mask.shape != expected:
            raise wrong_shape("query_mask", f"shape {list(expected)}", query_mask, list(expected))
    check_labels(request, bound)
    check_edits(request.edits, bound)
    able = statistics_of(bound.spec)
    own_keys = bound.module is None or request.key is None  # as far as a request tells
    check_able(request.statistics, NEEDS_NEEDLE | NEEDS_PAIRS | able)
    check_unspoiled(request.statistics, request.edits)
    statistics = bind_statistics(
        request.statistics, request.statistic_options,
        batch=bound.batch, queries=bound.queries, keys=bound.keys - bound.added_keys, able=able,
        normalize=request.normalize, implicit=has_implicit_weights(bound.spec),
        same_tokens=bound.queries == bound.keys and not (bound.past or bound.added_keys) and own_keys,
    )  # fmt: skip
    plain = all(option is None for option in (request.statistics, request.compare, request.pool, request.normalize))
    question = PlanKey(
        "weights",
        kernel=request.kernel,
        needs=Needs(edits=bool(request.edits), taps_gradient=True),
        asks=(
            request.top_k, request.return_weights, request.average_heads, request.pool, request.compare,
            query_mask is not None, None if request.statistics is None else tuple(request.statistics),
            request.normalize, selection_sizes(selection), edit_sizes(request.edits), keys and len(keys),
            statistics.pairs and statistics.pairs.sizes,
        ),
        has_sizes=not plain or keys is not None or names_tokens(request.edits, selection),
        pairs=has_implicit_weights(bound.spec),
    )  # fmt: skip

    def operate(bound: BoundRequest, kernel: str | Kernel = "") -> Inspection:
        return Inspection(bound, request, selection, statistics, keys)

    plan = plan_request(bound, question, device, capacity, Rehearsed(operate))
    joining = None
    if query_mask is None and plain and keys is None and not request.edits and joinable(bound):
        joining = joining_of(bound, question, selection, plan.kernel, device, Rehearsed(operate))
    return Prepared("weights", plan, bound.dtype, device.torch, operate, joining=joining)


@dataclass(eq=False, slots=True)
class Inspection(DeviceOperation):
    """Statistics of the weights, the top keys and the weights themselves, of one request or of several stacked."""

    bound: BoundRequest
    request: WeightsRequest
    selection: Selection
    statistics: BoundStatistics = field(default_factory=BoundStatistics)
    keys: Sequence[int] | None = None
    """The keys whose weights are returned; None for all."""
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
        if not (problem.finite or uploaded.edits) and (looked_over := finite_part(problem))[1] is None:
            problem = looked_over[0]  # tiles need not look again
        problem, before = self._with_weights(problem, uploaded.edits)
        real = real_queries(problem) if mask is None else mask
        edits, statistics = uploaded.edits, self.statistics
        if statistics.corrected:
            problem, before, edits = self._corrected(problem, before, edits, real)
        keep = request.return_weights and self.selection == Selection()
        tiled = TiledWeights(problem, edits, keep=keep, with_context=self.with_context)
        weights_by = self._of_keys(tiled.read if keep else partial(weights_of, problem, edits=edits))
        totals_by = partial(
            totals, problem, real, tiles(problem, Selection()), names=statistics.names, corrected=statistics.corrected,
            inputs=statistics.inputs(problem.q.device, positions_of(problem)),
        )  # fmt: skip
        sums = totals_by(compute=tiled.compute)
        means = sums.means()
        results: Results = {"statistics": self._in_reply(means), "queries": compute.in_reply(sums.queries, bound)}
        pools = pooled_magnitudes if problem.implicit else pooled_weights
        if tiled.context is not None:
            results["context"] = tiled.context
        unedited = None
        if request.compare is not None:
            unedited = self._of_keys(partial(weights_of, before))
            without = totals_by(compute=TiledWeights(before).compute).means()
            results["differences"] = {"statistics": self._in_reply(_minus(means, without))}
        if request.top_k:
            phase("top", "weights")
            count = bound.keys if self.keys is None else len(self.keys)
            weights, keys = self._top(problem, min(request.top_k, count), weights_by)
            if self.keys is not None:  # by their index among all
                keys = constant([*self.keys, -1], keys.device, keys.dtype)[keys]
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
            weights = tiled.whole if keep and self.keys is None else weights_by(self.selection)
            results |= compute.tap_results(bound, {"weights": weights}, average_heads=request.average_heads)
            if unedited is not None:
                moved = {"weights": weights - unedited(self.selection)}
                results["differences"] |= compute.tap_results(bound, moved, average_heads=request.average_heads)
        return results

    def _of_keys(self, weights: Weights) -> Weights:
        """The weights of the selected keys alone."""
        keys = self.keys
        return weights if keys is None else lambda tile: pick(weights(tile), 3, keys)

    def _corrected(
        self, problem: Problem, before: Problem, edits: Sequence[BoundEdit], real: Tensor
    ) -> tuple[Problem, Problem, Sequence[BoundEdit]]:
        """The attention with corrected weights, the same without the edits, and no edits: the weights have them."""
        if self.request.compare is not None:
            before = with_correction(before, weights_of(before, Selection()), real)
        return with_correction(problem, weights_of(problem, Selection(), edits), real), before, ()

    def _top(self, problem: Problem, count: int, weights_by: Weights) -> tuple[Tensor, Tensor]:
        """The most attended keys; of corrected weights, which may be negative, padding is none of them."""
        if not self.statistics.corrected or problem.key_mask is None:
            return top(problem, self.selection, count, weights_by)
        padding = ~problem.key_mask[:, None, None]
        padding = padding if self.keys is None else pick(padding, 3, self.keys)
        weights, keys = top(
            problem, self.selection, count, lambda tile: weights_by(tile).masked_fill(padding, -torch.inf)
        )
        beyond = weights == -torch.inf
        return weights.masked_fill(beyond, 0), keys.masked_fill(beyond, -1)

    def _with_weights(self, problem: Problem, edits: Sequence[BoundEdit]) -> tuple[Problem, Problem]:
        """The attention with its implicit weights, if it has these, and the same without the edits."""
        before = problem if self.before is None else self.before
        if not self.statistics.implicit:
            return problem, before
        if problem.given is not None:
            return replace(problem, implicit=True), replace(before, implicit=True)
        weighted = with_implicit_weights(problem, edits)
        moved = self.request.compare is not None and any(edit.tap in {"q", "k"} for edit in edits)
        return weighted, with_implicit_weights(before) if moved else weighted

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

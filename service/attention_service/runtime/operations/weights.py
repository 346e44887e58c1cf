"""Inspection: what each head looks at. Statistics over the real queries, top keys, the weights themselves."""

from dataclasses import dataclass

import torch

from attention_contract.errors import ShapeMismatch
from attention_contract.schemas.weights import WeightsRequest
from attention_service.core.arrays import to_torch
from attention_service.core.blocks import blocks
from attention_service.core.inspection import real_queries, top, totals, weights_after
from attention_service.core.phases import phase
from attention_service.core.types import Selection
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound import Bound
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.binding.selection import bind_selection, check_edits, check_tap
from attention_service.runtime.device import Device
from attention_service.runtime.operations import compute
from attention_service.runtime.operations.forward import joining_of, tap_results
from attention_service.runtime.operations.operation import Fields, Results, Uploaded, on_host
from attention_service.runtime.planning.kernel_choice import Purpose
from attention_service.runtime.planning.planner import Question, edit_actions, plan_request
from attention_service.runtime.scheduling.batches import joinable
from attention_service.runtime.scheduling.jobs import Job, Prepared


def prepare(module: Module | None, request: WeightsRequest, device: Device, room: int) -> Job:
    """Bind and plan one inspection. Raises an InvalidRequest that names the field at fault.

    ``room``: the bytes that it may need at most, which bear on the kernel.
    """
    bound = bind(module, request)
    check_tap("weights", bound.spec, "spec.method")
    selection = bind_selection(request.select, bound)
    query_mask = request.query_mask
    if query_mask is not None:
        expected = (bound.batch, bound.queries) if bound.layout.batched else (bound.queries,)
        if query_mask.shape != expected:
            raise ShapeMismatch(
                f"query_mask: expected shape {list(expected)}, got {list(query_mask.shape)}",
                param="query_mask",
                expected=list(expected),
                actual=list(query_mask.shape),
            )
    check_edits(request.edits, bound)
    question = Question(
        purpose=Purpose("weights", keeps_weights=True, top_k=request.top_k),
        kernel=request.kernel,
        taps=frozenset({"weights"} if request.return_weights else ()),
        averaged=request.average_heads,
        edits=edit_actions(request.edits),
    )
    plan = plan_request(bound, question, device, room, selection, request.edits)

    def operation(bound: Bound) -> Inspection:
        return Inspection(bound, request, selection)

    joining = None
    if query_mask is None and not request.edits and joinable(bound):
        joining = joining_of(bound, question, selection, plan.kernel, device)
    return Job(Prepared("weights", plan, bound.dtype, device.torch, operation, joining=joining), bound, module)


@dataclass(eq=False, slots=True)
class Inspection:
    """Statistics of the weights, the top keys and the weights themselves, of one request or of several stacked."""

    bound: Bound
    request: WeightsRequest
    selection: Selection

    def upload(self, device: torch.device) -> Uploaded:
        """Copy the inputs and the query mask to the device."""
        uploaded = compute.upload(self.bound, device, self.request.edits)
        if self.request.query_mask is not None:
            uploaded.tensors["query_mask"] = to_torch(self.request.query_mask).to(device)
        return uploaded

    def launch(self, uploaded: Uploaded) -> Results:
        """Compute the weights block by block."""
        bound, request = self.bound, self.request
        mask = uploaded.tensors.pop("query_mask", None)
        phase("project", "roles")
        problem = compute.problem(bound, uploaded.tensors, uploaded.parameters)
        uploaded.tensors.clear()
        phase("statistics", "weights")
        real = real_queries(problem) if mask is None else mask.reshape(bound.batch, bound.queries)
        weights_by = weights_after(problem, uploaded.edits)
        found = totals(problem, real, blocks(problem, Selection()), weights_by)
        dtype = "float64" if bound.dtype == "float64" else "float32"
        results: Results = {
            "statistics": {
                name: compute.in_reply(mean, bound, "weights", dtype) for name, mean in found.means().items()
            },
            "queries": compute.in_reply(found.queries, bound),
        }
        if request.top_k:
            phase("top", "weights")
            weights, keys = top(problem, self.selection, min(request.top_k, bound.keys), weights_by)
            results["top"] = {
                "keys": compute.in_reply(keys, bound, "weights"),
                "weights": compute.in_reply(weights, bound, "weights"),
            }
        if request.return_weights:
            phase("weights", "weights")
            weights = weights_by(self.selection)
            results |= tap_results(bound, {"weights": weights}, average_heads=request.average_heads)
        return results

    def collect(self, results: Results) -> Fields:
        """Copy the results to the host."""
        return on_host(results)

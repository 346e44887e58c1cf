"""Inspection: what each head looks at. Statistics over the real queries, top keys, the weights themselves."""

import torch
from torch import Tensor

from attention_contract.errors import ShapeMismatch
from attention_contract.schemas.weights import WeightsRequest
from attention_service.core.arrays import to_torch
from attention_service.core.blocks import blocks
from attention_service.core.inspection import real_queries, top, totals, weights_of
from attention_service.core.types import Selection
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound import Bound
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.binding.selection import bind_selection, check_tap
from attention_service.runtime.device import Device
from attention_service.runtime.operations import compute
from attention_service.runtime.operations.forward import batch_kind, tap_fields
from attention_service.runtime.planning.planner import Purpose, Question, plan_request
from attention_service.runtime.scheduling.jobs import Fields, Job
from attention_service.runtime.scheduling.joining import Part, in_common, joinable, size_of


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
    question = Question(
        purpose=Purpose("weights", keeps_weights=True, top_k=request.top_k),
        kernel=request.kernel,
        taps=frozenset({"weights"} if request.return_weights else ()),
        averaged=request.average_heads,
    )
    plan = plan_request(bound, question, device, room, selection)

    def passed(bound: Bound) -> Fields:
        return _run(bound, request, selection, device.torch)

    def part() -> Part:
        kind = batch_kind(bound, question, selection, plan.kernel, device)
        key = module, kind, in_common(bound), selection
        return Part(kind, key, bound, size_of([bound]), plan.peak_bytes, passed)

    joins = part if query_mask is None and joinable(bound) else None
    return Job("weights", plan, bound.dtype, module, lambda: passed(bound), make_part=joins)


@torch.inference_mode()
def _run(bound: Bound, request: WeightsRequest, selection: Selection, device: torch.device) -> Fields:
    problem = compute.problem(bound, compute.load(bound, device), compute.load_parameters(bound, device))
    real = real_queries(problem) if request.query_mask is None else _given(bound, request, device)
    found = totals(problem, real, blocks(problem, Selection()))
    dtype = "float64" if bound.dtype == "float64" else "float32"
    fields: Fields = {
        "statistics": {name: compute.answer(mean, bound, "weights", dtype) for name, mean in found.means().items()},
        "queries": compute.answer(found.queries, bound),
    }
    if request.top_k:
        weights, keys = top(problem, selection, min(request.top_k, bound.keys))
        fields["top"] = {
            "keys": compute.answer(keys, bound, "weights"),
            "weights": compute.answer(weights, bound, "weights"),
        }
    if request.return_weights:
        weights = weights_of(problem, selection)
        fields |= tap_fields(bound, {"weights": weights}, average_heads=request.average_heads)
    return fields


def _given(bound: Bound, request: WeightsRequest, device: torch.device) -> Tensor:
    """Bool ``[B, Q]``: the queries that the request says are real."""
    if request.query_mask is None:
        raise TypeError("the request has no query_mask")
    return to_torch(request.query_mask).to(device).reshape(bound.batch, bound.queries)

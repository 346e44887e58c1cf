"""Inspection: what each head looks at. Statistics over the real queries, top keys, the weights themselves."""

from dataclasses import replace

import torch
from torch import Tensor

from attention_contract.errors import ShapeMismatch
from attention_contract.schemas.weights import WeightsRequest
from attention_service import cost
from attention_service.core.arrays import TORCH_DTYPES, to_torch
from attention_service.core.blocks import blocks
from attention_service.core.inspection import real_queries, top, totals, weights_after
from attention_service.core.labour import labour
from attention_service.core.types import Selection
from attention_service.cost import Clock, Workload
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound import Bound
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.binding.selection import bind_selection, check_edits, check_tap
from attention_service.runtime.device import Device
from attention_service.runtime.operations import compute
from attention_service.runtime.operations.forward import tap_fields
from attention_service.runtime.planning.planner import QUICK, Plan, Purpose, choose_kernel, workload
from attention_service.runtime.scheduling.jobs import Fields, Job
from attention_service.runtime.scheduling.joining import Kind, Part, in_common, joinable, size_of


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
    taps = ("weights",) if request.return_weights else ()
    work = workload(bound, device, taps, selection, edits=request.edits, averaged=request.average_heads)
    kind, plan = device.plans.get(
        device.clock,
        ("weights", work.key, bound.dtype, request.kernel, room, request.top_k),
        lambda: _planned(work, bound.dtype, request, device, room),
    )

    def passed(bound: Bound) -> Fields:
        return _run(bound, request, selection, device.torch)

    def part() -> Part:
        asked = selection, request.top_k, request.return_weights, request.average_heads
        key = module, kind, in_common(bound), asked
        return Part(kind, key, bound, size_of([bound]), plan.peak_bytes, passed)

    joins = part if query_mask is None and not request.edits and joinable(bound) else None
    return Job("weights", plan, bound.dtype, module, lambda: passed(bound), make_part=joins)


def _planned(work: Workload, dtype: str, request: WeightsRequest, device: Device, room: int) -> tuple[Kind, Plan]:
    choose_kernel(work, dtype, device, request.kernel, room, Purpose(keeps_weights=True))
    clock, named = device.clock, request.top_k
    alike = replace(work, batch=1, queries=1, keys=1)

    def make() -> Kind:
        return Kind(work, lambda sized: clock.inspection(sized, named=named), lambda sized: _plan(sized, named, clock))

    return device.plans.get(clock, ("weights kind", alike.key, dtype, named), make), _plan(work, named, clock)


def _plan(work: Workload, named: int, clock: Clock) -> Plan:
    peak = cost.inspection_peak_bytes(work, named)
    if work.edited:  # all weights are computed at once, and stay while they are inspected
        peak += cost.peak_bytes(replace(cost.plainly(work), taps=frozenset({"weights"})), "materialized")
    return Plan(
        kernel="materialized",
        # Rows of weights are computed as beside a fused kernel, block by block; the context is not, but is counted.
        flops=cost.executed_flops(work, "materialized"),
        peak_bytes=peak,
        predicted=clock.inspection(work, named=named),
        laborious=labour(work.spec.masks) > QUICK,
    )


@torch.inference_mode()
def _run(bound: Bound, request: WeightsRequest, selection: Selection, device: torch.device) -> Fields:
    problem = compute.problem(bound, compute.load(bound, device), compute.load_parameters(bound, device))
    real = real_queries(problem) if request.query_mask is None else _given(bound, request, device)
    weights_by = weights_after(problem, compute.bind_edits(request.edits, device, TORCH_DTYPES[bound.dtype]))
    found = totals(problem, real, blocks(problem, Selection()), weights_by)
    dtype = "float64" if bound.dtype == "float64" else "float32"
    fields: Fields = {
        "statistics": {name: compute.answer(mean, bound, "weights", dtype) for name, mean in found.means().items()},
        "queries": compute.answer(found.queries, bound),
    }
    if request.top_k:
        weights, keys = top(problem, selection, min(request.top_k, bound.keys), weights_by)
        fields["top"] = {
            "keys": compute.answer(keys, bound, "weights"),
            "weights": compute.answer(weights, bound, "weights"),
        }
    if request.return_weights:
        weights = weights_by(selection)
        fields |= tap_fields(bound, {"weights": weights}, average_heads=request.average_heads)
    return fields


def _given(bound: Bound, request: WeightsRequest, device: torch.device) -> Tensor:
    """Bool ``[B, Q]``: the queries that the request says are real."""
    if request.query_mask is None:
        raise TypeError("the request has no query_mask")
    return to_torch(request.query_mask).to(device).reshape(bound.batch, bound.queries)

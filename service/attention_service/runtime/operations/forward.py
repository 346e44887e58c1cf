"""Forward: the output of one attention, and any taps along it."""

from dataclasses import replace

import torch
from torch import Tensor

from attention_contract.schemas.attention import ApproximationError, ForwardRequest
from attention_service import cost
from attention_service.core.arrays import TORCH_DTYPES
from attention_service.core.attention import attend
from attention_service.core.comparison import Compared, compare
from attention_service.core.kernels import is_compiled
from attention_service.core.methods import approximation_of
from attention_service.core.multihead import Parameters
from attention_service.core.stages import kept_weights
from attention_service.core.types import Problem, Selection
from attention_service.cost import Workload
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound import Bound
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.binding.request_signature import Outline, inputs_of, likeness
from attention_service.runtime.binding.selection import bind_selection, check_edits, check_taps
from attention_service.runtime.device import Device
from attention_service.runtime.operations import compute, graphed
from attention_service.runtime.operations.direct import direct
from attention_service.runtime.planning.planner import Plan, choose_kernel, plan_forward, workload
from attention_service.runtime.scheduling.jobs import Fields, Job
from attention_service.runtime.scheduling.joining import Kind, Part, in_common, joinable, size_of


def prepare(module: Module | None, request: ForwardRequest, device: Device, room: int) -> Job:
    """Bind and plan one forward pass. Raises an InvalidRequest that names the field at fault.

    ``room``: the bytes that it may need at most, which bear on the kernel.
    """
    outline = outline_of(module, request, device, room)
    if outline is None:
        bound = bind(module, request)
        return job_of(_outlined(bound, request, device, room), bound, request, device)
    return job_of(outline, outline.filled(module, inputs_of(request)), request, device)


def outline_of(module: Module | None, request: ForwardRequest, device: Device, room: int) -> Outline | None:
    """The outline of a request, made now unless one like it came before; None for one that is better bound anew.

    Raises as ``prepare`` does.
    """
    like = likeness(module, request)
    if like is None:
        return None

    def make() -> Outline:
        outline = _outlined(bind(module, request), request, device, room)
        return replace(outline, bound=outline.bound.of(module=None, arrays={}))

    found: Outline = device.plans.get(device.clock, ("forward like", like, room), make)
    return found


def _outlined(bound: Bound, request: ForwardRequest, device: Device, room: int) -> Outline:
    check_taps(request.return_, bound.spec)
    selection = bind_selection(request.select, bound)
    check_edits(request.edits, bound)
    asked = {"reported": request.report_error, "averaged": request.average_heads}
    work = workload(bound, device, request.return_, selection, edits=request.edits, **asked)
    plan, kind = device.plans.get(
        device.clock,
        ("forward", work.key, bound.dtype, request.kernel, room),
        lambda: _planned(work, choose_kernel(work, bound.dtype, device, request.kernel, room), bound.dtype, device),
    )
    plan = with_dropout_mask(plan, work, request)
    watched = not (request.edits or request.report_error or is_compiled(plan.kernel) or returns_mask(request))
    common = None
    if watched and joinable(bound):
        common = kind, in_common(bound), selection, tuple(request.return_), request.average_heads
    swift = direct(bound, request, plan.kernel, device.torch)
    return Outline(bound, selection, plan, kind, watched, swift, size_of([bound]), common)


def _planned(work: Workload, kernel: str, dtype: str, device: Device) -> tuple[Plan, Kind]:
    clock = device.clock
    alike = replace(work, batch=1, queries=1, keys=1)

    def make() -> Kind:
        return Kind(work, lambda sized: clock.forward(sized, kernel), lambda sized: plan_forward(sized, kernel, clock))

    return plan_forward(work, kernel, clock), device.plans.get(clock, ("forward kind", alike.key, dtype, kernel), make)


def job_of(outline: Outline, bound: Bound, request: ForwardRequest, device: Device) -> Job:
    """The job of a request that was bound; its outline says all but its numbers."""
    plan, module = outline.plan, bound.module

    def passed(bound: Bound) -> Fields:
        if outline.direct is not None and (fields := outline.direct.run(bound)) is not None:
            return fields
        if device.is_cuda and graphed.takes(bound, request, plan.kernel):
            return graphed.run(bound, plan.kernel, plan.peak_bytes, device)
        return run(bound, request, outline.selection, plan.kernel, device.torch)

    def part() -> Part:
        return Part(outline.kind, (module, outline.common), bound, outline.size, plan.peak_bytes, passed)

    joins = None if outline.common is None else part
    return Job("forward", plan, bound.dtype, module, lambda: passed(bound), outline.watched, joins)


@torch.inference_mode()
def run(bound: Bound, request: ForwardRequest, selection: Selection, kernel: str, device: torch.device) -> Fields:
    """The asked taps as the reply's fields."""
    parameters = compute.load_parameters(bound, device)
    edits = compute.bind_edits(request.edits, device, TORCH_DTYPES[bound.dtype])
    problem = compute.problem(bound, compute.load(bound, device), parameters)
    inner = [tap for tap in request.return_ if tap != "output"]
    attended = attend(problem, inner, selection, edits, kernel)
    fields = tap_fields(bound, attended.taps, average_heads=request.average_heads)
    fields |= {name: compute.answer(x, bound, "k", accumulated(bound)) for name, x in attended.state.items()}
    fields |= dropout_fields(bound, request, problem, selection)
    if bound.past or "past_key" in bound.arrays:
        fields["present_key"] = compute.answer(problem.k[:, :, : problem.keys], bound, "k")
        fields["present_value"] = compute.answer(problem.v[:, :, : problem.keys], bound, "v")
    compared = _compared(bound, problem) if request.report_error else None
    del problem  # queries, keys and values are not held beside the output
    if "output" in request.return_:
        output = compute.output(bound, parameters, attended.context, edits)
        fields["output"] = compute.answer(output, bound, "output")
    if compared is not None:
        fields["error"] = _error(bound, parameters, compared, attended.context)
    return fields


def _compared(bound: Bound, problem: Problem) -> Compared:
    """Exact attention over the same inputs."""
    method = approximation_of(bound.spec)
    if method is None:
        raise TypeError("exact attention has no error; it is refused when the request is bound")
    return compare(problem, method)


def _error(bound: Bound, parameters: Parameters, compared: Compared, context: Tensor) -> ApproximationError:
    """The output against that of exact attention."""
    exact, output = (compute.output(bound, parameters, each) for each in (compared.context, context))
    difference = (output - exact).double()
    if not difference.numel():
        return ApproximationError(max=0.0, rms=0.0, mean_kl=compared.mean_kl)
    return ApproximationError(
        max=float(difference.abs().amax()), rms=float(difference.square().mean().sqrt()), mean_kl=compared.mean_kl
    )


def accumulated(bound: Bound) -> str:
    """The dtype in which a state is answered."""
    return "float64" if bound.dtype == "float64" else "float32"


def returns_mask(request: ForwardRequest) -> bool:
    """Whether it is returned which weights are kept."""
    return request.dropout is not None and request.dropout.return_mask


def with_dropout_mask(plan: Plan, work: Workload, request: ForwardRequest) -> Plan:
    """A plan with the memory of the mask of the kept weights, which is made in blocks and put together."""
    if not returns_mask(request):
        return plan
    whole = cost.tap_elements(work, "weights")
    return replace(plan, peak_bytes=plan.peak_bytes + 2 * whole)


def dropout_fields(bound: Bound, request: ForwardRequest, problem: Problem, selection: Selection) -> Fields:
    """Which weights are kept, where the request asks for it."""
    if not returns_mask(request):
        return {}
    return {"dropout_mask": compute.answer(kept_weights(problem, selection), bound, "weights")}


def tap_fields(bound: Bound, taps: dict[str, Tensor], *, average_heads: bool) -> Fields:
    """Taps, without the output, as the reply carries them."""
    fields: Fields = {}
    for tap, value in taps.items():
        if tap == "weights" and average_heads:
            fields[tap] = compute.answer(value.mean(dim=1), bound)
        else:
            fields[tap] = compute.answer(value, bound, tap)
    return fields

"""Forward: the output of one attention, and any taps along it."""

import torch
from torch import Tensor

from attention_contract.schemas.attention import ForwardRequest
from attention_service.core.arrays import TORCH_DTYPES
from attention_service.core.attention import attend
from attention_service.core.stages import kept_weights
from attention_service.core.types import Problem, Selection
from attention_service.modules.resident import Module
from attention_service.runtime import compute
from attention_service.runtime.binding import Bound, bind
from attention_service.runtime.device import Device
from attention_service.runtime.jobs import Fields, Job
from attention_service.runtime.planning import choose_kernel, plan_forward, workload
from attention_service.runtime.selecting import bind_selection, check_edits, check_taps


def prepare(module: Module | None, request: ForwardRequest, device: Device, room: int) -> Job:
    """Bind and plan one forward pass. Raises an InvalidRequest that names the field at fault.

    ``room``: the bytes that it may need at most, which bear on the kernel.
    """
    bound = bind(module, request)
    check_taps(request.return_, bound.spec)
    selection = bind_selection(request.select, bound)
    check_edits(request.edits, bound)
    work = workload(bound, device, request.return_, selection, edited=bool(request.edits))
    kernel = choose_kernel(work, bound.dtype, device, request.kernel, room)
    plan = plan_forward(work, kernel, device.rates)
    return Job(plan, bound.dtype, module, lambda: run(bound, request, selection, kernel, device.torch))


@torch.inference_mode()
def run(bound: Bound, request: ForwardRequest, selection: Selection, kernel: str, device: torch.device) -> Fields:
    """The asked taps as the reply's fields."""
    parameters = compute.load_parameters(bound, device)
    edits = compute.bind_edits(request.edits, device, TORCH_DTYPES[bound.dtype])
    problem = compute.problem(bound, compute.load(bound, device), parameters)
    inner = [tap for tap in request.return_ if tap != "output"]
    attended = attend(problem, inner, selection, edits, kernel)
    fields = tap_fields(bound, attended.taps, average_heads=request.average_heads)
    if "output" in request.return_:
        output = compute.output(bound, parameters, attended.context, edits)
        fields["output"] = compute.answer(output, bound, "output")
    fields |= dropout_fields(bound, request, problem, selection)
    if bound.past or "past_key" in bound.arrays:
        fields["present_key"] = compute.answer(problem.k[:, :, : problem.keys], bound, "k")
        fields["present_value"] = compute.answer(problem.v[:, :, : problem.keys], bound, "v")
    return fields


def dropout_fields(bound: Bound, request: ForwardRequest, problem: Problem, selection: Selection) -> Fields:
    """Which weights are kept, where the request asks for it."""
    if request.dropout is None or not request.dropout.return_mask:
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

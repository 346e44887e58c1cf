"""Forward: the output of one attention, and any taps along it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention_contract.schemas.attention import ApproximationError, ForwardRequest
from attention_service.core.attention import attend
from attention_service.core.comparison import Compared, compare
from attention_service.core.kernels import Kernel, is_compiled
from attention_service.core.methods import approximation_of
from attention_service.core.multihead import Parameters
from attention_service.core.phases import phase
from attention_service.core.stages import kept_weights
from attention_service.core.types import Problem, Selection
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound import Bound
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.binding.selection import bind_selection, check_edits, check_taps
from attention_service.runtime.device import Device
from attention_service.runtime.operations import compute, graphed
from attention_service.runtime.operations.operation import Fields, Operation, Results, Uploaded, execute, on_host
from attention_service.runtime.planning.planner import Question, batch_plans, edit_actions, family_of, plan_request
from attention_service.runtime.scheduling.jobs import Job
from attention_service.runtime.scheduling.joining import Kind, Part, in_common, joinable, size_of


def prepare(module: Module | None, request: ForwardRequest, device: Device, room: int) -> Job:
    """Bind and plan one forward pass. Raises an InvalidRequest that names the field at fault.

    ``room``: the bytes that it may need at most, which bear on the kernel.
    """
    bound = bind(module, request)
    check_taps(request.return_, bound.spec)
    selection = bind_selection(request.select, bound)
    check_edits(request.edits, bound)
    question = Question(
        kernel=request.kernel,
        taps=frozenset(request.return_),
        averaged=request.average_heads,
        reported=request.report_error,
        returns_dropout_mask=returns_mask(request),
        edits=edit_actions(request.edits),
    )
    plan = plan_request(bound, question, device, room, selection, request.edits)

    def operation(bound: Bound) -> Operation:
        if device.is_cuda and graphed.takes(bound, request, plan.kernel):
            return graphed.Graphed(bound, plan.kernel, plan.peak_bytes, device)
        return Forward(bound, request, selection, plan.kernel)

    def part() -> Part:
        kind = batch_kind(bound, question, selection, plan.kernel, device)
        key = module, kind, in_common(bound), selection, tuple(request.return_), request.average_heads
        run = lambda whole: execute(operation(whole), device.torch)  # noqa: E731
        return Part(kind, key, bound, size_of([bound]), plan.peak_bytes, run)

    watched = not (request.edits or request.report_error or is_compiled(plan.kernel) or returns_mask(request))
    joins = part if watched and joinable(bound) else None
    return Job("forward", plan, bound.dtype, module, operation(bound), device.torch, watched, joins)


def batch_kind(bound: Bound, question: Question, selection: Selection, kernel: str, device: Device) -> Kind:
    """The requests that this one may run together with."""

    def make() -> Kind:
        plans = batch_plans(bound, question, selection, kernel, device)
        return Kind(plans.costs.work, plans.predict, plans.plan)

    return device.plans.get(device.clock, ("batch", family_of(bound, question, device), kernel), make)


@dataclass(eq=False, slots=True)
class Forward:
    """One forward pass, or several stacked along the batch."""

    bound: Bound
    request: ForwardRequest
    selection: Selection
    kernel: str | Kernel

    def upload(self, device: torch.device) -> Uploaded:
        """Copy the inputs and the tensors of the edits to the device."""
        return compute.upload(self.bound, device, self.request.edits)

    def launch(self, uploaded: Uploaded) -> Results:
        """Compute the output and the taps that the request returns.

        No inference mode: nothing requires a gradient, and entering the mode takes longer than autograd's checks.
        """
        bound, request, parameters = self.bound, self.request, uploaded.parameters
        inner = [tap for tap in request.return_ if tap != "output"]
        phase("prepare" if bound.module is None else "project", "roles")
        problem = compute.problem(bound, uploaded.tensors, parameters, views=not inner)
        uploaded.tensors.clear()
        phase("attention", "context", "pairs")
        attended = attend(problem, inner, self.selection, uploaded.edits, self.kernel)
        phase("answer", "taps")
        results = tap_results(bound, attended.taps, average_heads=request.average_heads)
        results |= {name: compute.in_reply(x, bound, "k", accumulated(bound)) for name, x in attended.state.items()}
        results |= dropout_results(bound, request, problem, self.selection)
        if bound.past or "past_key" in bound.arrays:
            results["present_key"] = compute.in_reply(problem.k[:, :, : problem.keys], bound, "k")
            results["present_value"] = compute.in_reply(problem.v[:, :, : problem.keys], bound, "v")
        if request.report_error:
            phase("compare with exact attention", "comparison")
        compared = _compared(bound, problem) if request.report_error else None
        del problem  # frees queries, keys and values before the output is made
        phase("project out", "output")
        if "output" in request.return_:
            output = compute.output(bound, parameters, attended.context, uploaded.edits)
            results["output"] = compute.in_reply(output, bound, "output")
        if compared is not None:
            phase("compare outputs", "outputs")
            results["error"] = _error(bound, parameters, compared, attended.context)
        return results

    def collect(self, results: Results) -> Fields:
        """Copy the results to the host."""
        fields = on_host(results)
        if (error := fields.get("error")) is not None:
            fields["error"] = ApproximationError(**{name: None if x is None else float(x) for name, x in error.items()})
        return fields


def _compared(bound: Bound, problem: Problem) -> Compared:
    """Exact attention over the same inputs."""
    method = approximation_of(bound.spec)
    if method is None:
        raise TypeError("exact attention has no error; binding refuses the request")
    return compare(problem, method)


def _error(bound: Bound, parameters: Parameters, compared: Compared, context: Tensor) -> Results:
    """The difference between the output and that of exact attention."""
    exact, output = (compute.output(bound, parameters, each) for each in (compared.context, context))
    difference = (output - exact).double()
    if not difference.numel():
        return {"max": 0.0, "rms": 0.0, "mean_kl": compared.mean_kl}
    return {"max": difference.abs().amax(), "rms": difference.square().mean().sqrt(), "mean_kl": compared.mean_kl}


def accumulated(bound: Bound) -> str:
    """The dtype in which a state is answered."""
    return "float64" if bound.dtype == "float64" else "float32"


def returns_mask(request: ForwardRequest) -> bool:
    """True if the request returns the mask of the weights that dropout keeps."""
    return request.dropout is not None and request.dropout.return_mask


def dropout_results(bound: Bound, request: ForwardRequest, problem: Problem, selection: Selection) -> Results:
    """The mask of the weights that dropout keeps, if the request returns it."""
    if not returns_mask(request):
        return {}
    return {"dropout_mask": compute.in_reply(kept_weights(problem, selection), bound, "weights")}


def tap_results(bound: Bound, taps: dict[str, Tensor], *, average_heads: bool) -> Results:
    """Taps, without the output, as the reply has them."""
    results: Results = {}
    for tap, value in taps.items():
        if tap == "weights" and average_heads:
            results[tap] = compute.in_reply(value.mean(dim=1), bound)
        else:
            results[tap] = compute.in_reply(value, bound, tap)
    return results

"""Forward: the output of one attention, and any taps along it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from attention_contract.schemas.attention import ApproximationError, ForwardRequest, TapsRequest
from attention_service import cost
from attention_service.core import multihead
from attention_service.core.attention import attend
from attention_service.core.edits import BoundEdit, apply
from attention_service.core.kernels import KERNELS, Kernel, Needs, is_compiled
from attention_service.core.kv_cache.past import write
from attention_service.core.masks.global_projections import separate_positions
from attention_service.core.masks.visibility import EVERYTHING
from attention_service.core.methods import approximation_of
from attention_service.core.methods.comparison import MethodComparison, compare
from attention_service.core.multihead import Parameters
from attention_service.core.positions import POSITIONS
from attention_service.core.positions.base import Inert
from attention_service.core.problem import Problem, Selection
from attention_service.core.slices import phase
from attention_service.core.stages import kept_weights
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.binding.selection import bind_selection, check_edits, check_taps, computes_pairs
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import compute, cuda_graph_forward
from attention_service.runtime.planning.blank_requests import exactly, unsent
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.planning.planner import (
    PlanKey,
    Rehearsed,
    edit_sizes,
    family_of,
    names_tokens,
    plan_pass,
    plan_request,
    selection_sizes,
)
from attention_service.runtime.scheduling.batches import in_common, joinable
from attention_service.runtime.scheduling.jobs import Job, JobJoiner, Prepared, is_short, job_of_request
from attention_service.runtime.scheduling.operation import DeviceOperation, Fields, Results, Uploaded, on_host

PLAIN = unsent(ForwardRequest, return_=["output"], edits=[])
_MIXED = {"query", "past_key", "past_value", "offsets", "positions"}
"""The tensors of requests of different lengths that run together."""
MIXED_BYTES = 2**20
"""Bytes of parameters from which on different lengths run together: one product reads the weights once. Measured with 8
requests of 1 to 8 tokens on one core: 1.5 times the rate at d_model 512, 3.9 times at 2048, and no gain at 64."""


def prepare(module: Module | None, request: ForwardRequest, device: Device, capacity: int) -> Job:
    """Bind and plan one forward pass. Raises an InvalidRequest that names the field at fault."""
    return job_of_request(_planned, bind(module, request), request, device, capacity)


def _planned(bound: BoundRequest, request: ForwardRequest, device: Device, capacity: int) -> Prepared:
    check_taps(request.return_, bound.spec)
    selection = bind_selection(request.select, bound)
    check_edits(request.edits, bound)
    question = PlanKey(
        kernel=request.kernel,
        needs=Needs(edits=bool(request.edits)),
        asks=(
            frozenset(request.return_), request.average_heads, request.compare, returns_mask(request),
            selection_sizes(selection), edit_sizes(request.edits),
        ),
        has_sizes=names_tokens(request.edits, selection),
        whole=request.report_error,
        pairs=computes_pairs(bound.spec, request.return_, request.edits),
    )  # fmt: skip
    rehearsed = rehearsed_forward(request, selection)
    plan = plan_request(bound, question, device, capacity, rehearsed)

    def need(bound: BoundRequest) -> int:
        return plan_pass(bound, question._replace(kernel=plan.kernel), device, bound.batch, rehearsed).peak_bytes

    def operation(bound: BoundRequest) -> DeviceOperation:
        by_graph = cuda_graph_forward.graphed(bound, plan.kernel, device, need) if may_be_graphed else None
        return by_graph or Forward(bound, request, selection, kernel)

    kernel = KERNELS[plan.kernel].make() if plan.kernel in KERNELS else plan.kernel  # else a method that approximates
    may_be_graphed = device.is_cuda and is_short(plan)  # graphs belong to the thread of short work
    may_be_graphed = may_be_graphed and cuda_graph_forward.takes(bound, request, plan.kernel)
    alone = request.edits or request.compare or request.report_error or returns_mask(request)
    watched = not (alone or is_compiled(plan.kernel))
    joining = None
    if watched and joinable(bound):
        mixed = None
        if mixes(bound, request):
            mixed = partial(Mixed, request=request, selection=selection, kernel=plan.kernel)
        joining = joining_of(bound, question, selection, plan.kernel, device, rehearsed, mixed)
    return Prepared("forward", plan, bound.dtype, device.torch, operation, watched, joining)


def rehearsed_forward(request: ForwardRequest, selection: Selection) -> Rehearsed:
    """Return the operation of a forward request as the planner rehearses it."""

    def operate(bound: BoundRequest, kernel: str | Kernel) -> Forward:
        return Forward(bound, request, selection, kernel)

    flops = partial(_flops, edited=request.compare is not None, exact=request.report_error)
    return Rehearsed(operate, flops, plain=None if request.return_ == ["output"] else plain_forward)


def plain_forward(bound: BoundRequest, kernel: str | Kernel) -> "Forward":
    """One forward pass that returns the output alone."""
    return Forward(bound, PLAIN, EVERYTHING, kernel)


PLAIN_FORWARD = Rehearsed(plain_forward)


def _flops(bound: BoundRequest, kernel: str, *, edited: bool, exact: bool) -> int:
    """FLOPs of the pass; with those without the edits, or of exact attention, if it is compared with them."""
    flops = cost.executed_flops(bound, kernel)
    if edited:  # once more, from the same queries, keys and values
        once = cost.flops(bound, masked=False)
        flops += flops - once.projections - once.position
    return flops + (cost.flops(exactly(bound), masked=False).total if exact else 0)


def joining_of(
    bound: BoundRequest,
    question: PlanKey,
    selection: Selection,
    kernel: str,
    device: Device,
    rehearsed: Rehearsed,
    mixed: Callable[[Sequence[BoundRequest]], DeviceOperation] | None = None,
) -> JobJoiner:
    """The means to join requests like this one: with others of equal lengths, or of any if ``mixed`` is given."""

    def plan(bound: BoundRequest, batch: int) -> Plan:
        return plan_pass(bound, question._replace(kernel=kernel), device, batch, rehearsed)

    family = family_of(bound, question, device) if bound.module is None else None
    lengths = (bound.queries, bound.keys) if mixed is None else None
    key = family, lengths, kernel, question, selection, in_common(bound)
    return JobJoiner(device.plans.get(device.clock, ("joining", key), object), plan, mixed)


@dataclass(eq=False, slots=True)
class Forward(DeviceOperation):
    """One forward pass, or several stacked along the batch."""

    bound: BoundRequest
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
        results: Results = {}
        if attended.taps:
            results = compute.tap_results(bound, attended.taps, average_heads=request.average_heads)
        unedited = None
        if request.compare is not None:
            phase("attention without the edits", "unedited context", "unedited pairs")
            unedited = attend(problem, inner, self.selection, (), self.kernel)
            phase("differences", "differences")
            moved = {tap: _minus(x, unedited.taps[tap]) for tap, x in attended.taps.items()}
            results["differences"] = compute.tap_results(bound, moved, average_heads=request.average_heads)
            unedited.taps.clear()
        for name, x in attended.state.items():
            results[name] = compute.in_reply(x, bound, "k", accumulated(bound))
        if request.dropout is not None:
            results |= dropout_results(bound, request, problem, self.selection)
        if bound.past or "past_key" in bound.arrays:
            results |= present(bound, problem, uploaded.edits)
        compared = None
        if request.report_error:
            phase("compare with exact attention", "comparison")
            compared = _compared(bound, problem)
        del problem  # frees queries, keys and values before the output is made
        phase("project out", "output")
        if "output" in request.return_:
            output = compute.output(bound, parameters, attended.context, uploaded.edits)
            results["output"] = compute.in_reply(output, bound, "output")
            if unedited is not None:
                phase("differences of the output", "unedited output")
                without = compute.output(bound, parameters, unedited.context)
                results["differences"]["output"] = compute.in_reply(_minus(output, without), bound, "output")
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


def _minus(edited: Tensor, unedited: Tensor) -> Tensor:
    """Subtract a tap; equal numbers, infinite ones too, differ by 0."""
    return (edited - unedited).masked_fill_(edited == unedited, 0)


def mixes(bound: BoundRequest, request: ForwardRequest) -> bool:
    """True if requests of different lengths share one product for all tokens, and gain by it."""
    if bound.module is None or bound.module.bytes < MIXED_BYTES or bound.arrays.keys() - _MIXED or bound.state_wanted:
        return False
    position = POSITIONS.of(bound.spec.position)
    plain = list(request.return_) == ["output"] and not separate_positions(bound.spec.masks)
    return plain and type(position).added is Inert.added


@dataclass(eq=False, slots=True)
class Mixed(DeviceOperation):
    """Self-attention of one module over sequences of different lengths: one product projects all tokens."""

    bounds: Sequence[BoundRequest]
    request: ForwardRequest
    selection: Selection
    kernel: str

    def upload(self, device: torch.device) -> Uploaded:
        """Copy the tokens of all sequences to the device, one behind the other, and the past of each."""
        tokens = np.concatenate([x.reshape(-1, x.shape[-1]) for x in (bound.arrays["query"] for bound in self.bounds)])
        uploaded = compute.upload(self.bounds[0].replaced(batch=1, arrays={"query": tokens[None]}), device)
        for index, bound in enumerate(self.bounds):
            others = {name: x for name, x in bound.arrays.items() if name != "query"}
            past = compute.load(bound.replaced(arrays=others), device)
            uploaded.tensors |= {f"{index}.{name}": x for name, x in past.items()}
        return uploaded

    def launch(self, uploaded: Uploaded) -> Results:
        """Project all tokens, attend for each length, project all contexts out."""
        tensors, parameters = uploaded.tensors, uploaded.parameters
        query = tensors.pop("query")
        counts = [bound.batch * bound.queries for bound in self.bounds]
        projected = compute.projected(self.bounds[0], query, parameters)
        parts = zip(*(x.split_with_sizes(counts, 2) for x in projected), strict=True)
        tokens = query.split_with_sizes(counts, 1)
        contexts, results = [], []
        for index, (bound, own, three) in enumerate(zip(self.bounds, tokens, parts, strict=True)):
            q, k, v = (_unfolded(x, bound.batch) for x in three)
            inputs = {"query": own.view(bound.batch, bound.queries, -1)}
            inputs |= {name: tensors.pop(f"{index}.{name}") for name in bound.arrays.keys() - {"query"}}
            problem = compute.problem(bound, inputs, parameters, three=(q, k, v))
            context = attend(problem, (), self.selection, (), self.kernel).context
            contexts.append(multihead.merge_heads(context).flatten(0, 1))
            results.append(present(bound, problem))
        output = multihead.project_merged(parameters, torch.cat(contexts)).split_with_sizes(counts)
        for bound, result, x in zip(self.bounds, results, output, strict=True):
            result["output"] = compute.in_reply(x.view(bound.output_shape), bound, "output")
        return {str(index): result for index, result in enumerate(results)}


def present(bound: BoundRequest, problem: Problem, edits: Sequence[BoundEdit] = ()) -> Results:
    """Keys and values of the past and of this request, if a past was sent.

    New ones of a session go into its pages, as ``edits`` make them.
    """
    if "past_key" not in bound.arrays:
        return {}
    if bound.cached is not None:
        new = slice(problem.past, problem.keys)
        keys, values = apply(edits, "k", problem.k), apply(edits, "v", problem.v)
        write(bound.cached, keys[:, :, new], values[:, :, new])
        return {}
    return {
        "present_key": compute.in_reply(problem.k[:, :, : problem.keys], bound, "k"),
        "present_value": compute.in_reply(problem.v[:, :, : problem.keys], bound, "v"),
    }


def _unfolded(x: Tensor, batch: int) -> Tensor:
    """``[1, H, B·L, W]`` to ``[B, H, L, W]``."""
    return x if batch == 1 else x[0].view(x.shape[1], batch, -1, x.shape[3]).transpose(0, 1)


def _compared(bound: BoundRequest, problem: Problem) -> MethodComparison:
    """Exact attention over the same inputs."""
    method = approximation_of(bound.spec)
    if method is None:
        raise TypeError("exact attention has no error; binding refuses the request")
    return compare(problem, method)


def _error(bound: BoundRequest, parameters: Parameters, compared: MethodComparison, context: Tensor) -> Results:
    """The difference between the output and that of exact attention."""
    exact, output = (compute.output(bound, parameters, mixed) for mixed in (compared.context, context))
    difference = (output - exact).double()
    if not difference.numel():
        return {"max": 0.0, "rms": 0.0, "mean_kl": compared.mean_kl}
    return {"max": difference.abs().amax(), "rms": difference.square().mean().sqrt(), "mean_kl": compared.mean_kl}


def accumulated(bound: BoundRequest) -> str:
    """The dtype in which a state is answered."""
    return "float64" if bound.dtype == "float64" else "float32"


def returns_mask(request: TapsRequest) -> bool:
    """True if the request returns the mask of the weights that dropout keeps."""
    return request.dropout is not None and request.dropout.return_mask


def dropout_results(bound: BoundRequest, request: TapsRequest, problem: Problem, selection: Selection) -> Results:
    """The mask of the weights that dropout keeps, if the request returns it."""
    if not returns_mask(request):
        return {}
    return {"dropout_mask": compute.in_reply(kept_weights(problem, selection), bound, "weights")}

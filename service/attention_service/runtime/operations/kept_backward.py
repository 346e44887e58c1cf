"""The two passes of gradients, run apart: the forward pass keeps its graph, and the backward pass uses it up."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.gradients import BackwardRequest, GradientsRequest, PassRequest
from attention_service import cost
from attention_service.core.kernels import Kernel
from attention_service.core.problem import Selection
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import compute
from attention_service.runtime.operations.differentiation import (
    UPSTREAM,
    AutogradGraph,
    Targets,
    differentiate,
    graph_of,
    upstream_of,
)
from attention_service.runtime.operations.gradients import Gradients, as_sent, check_upstream, kinds_of, targets_of
from attention_service.runtime.planning.blank_requests import unsent
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.planning.planner import PlanKey, Rehearsed, plan_request
from attention_service.runtime.scheduling.jobs import Job, Prepared
from attention_service.runtime.scheduling.operation import DeviceOperation, Results, Uploaded

_NOTHING = np.empty(0, np.float32)


@dataclass(frozen=True, eq=False)
class KeptPass:
    """A forward pass with all that its backward pass needs."""

    bound: BoundRequest
    """The request without its tensors, of which the graph holds those that it needs."""
    targets: Targets
    ranks: Mapping[str, int]
    """Dimensions of the inputs that get a gradient, as they were sent."""
    graph: AutogradGraph
    plan: Plan
    """The plan of the backward pass. Its peak memory is that of both passes, so it bounds what is kept."""


def prepare(module: Module | None, request: PassRequest, device: Device, capacity: int) -> Job:
    """Bind and plan a forward pass that is kept. Raises an InvalidRequest that names the field at fault."""
    bound = bind(module, request)
    if request.dropout is not None and request.dropout.return_mask:
        raise InvalidRequest.at(
            "dropout.return_mask", "a kept pass returns only its output; leave it out, or send a forward request"
        )
    targets = targets_of(request.wrt, (), bound)
    for index, name in enumerate(request.wrt):
        if name in (*targets.taps, *targets.upstreams):
            raise InvalidRequest.at(
                f"wrt.{index}", f"a kept pass has gradients of inputs and parameters; use gradients for {name}"
            )
    first, second = (
        plan_request(
            bound,
            PlanKey("gradients", kernel=request.kernel, asks=("kept", targets, half)),
            device,
            capacity,
            _rehearsed(request, targets, half),
        )
        for half in ("forward", "backward")
    )

    def operation(bound: BoundRequest) -> ForwardPass:
        return ForwardPass(bound, request, targets, first.kernel, second)

    return Job(Prepared("forward", first, bound.dtype, device.torch, operation, watched=False), bound, module)


def _rehearsed(request: PassRequest, targets: Targets, half: str) -> Rehearsed:
    """Return one of the passes as the planner rehearses it: the memory is that of both, one after the other."""
    sent = {name: getattr(request, name) for name in targets.inputs}
    gradients = unsent(GradientsRequest, wrt=[], return_=[], edits=[], **sent)
    wrt = kinds_of(targets)

    def operate(bound: BoundRequest, kernel: str | Kernel) -> Gradients:
        return Gradients(bound, gradients, Selection(), targets, kernel)

    def flops(bound: BoundRequest, kernel: str) -> int:
        if half == "forward":
            return cost.executed_flops(bound, kernel)
        return cost.executed_backward_flops(bound, kernel, wrt)

    others = ("backward of attention",) if half == "forward" else ("inputs", "attention")
    return Rehearsed(operate, flops, dict.fromkeys(others, 0.0))


def prepare_backward(kept: KeptPass, request: BackwardRequest, device: Device) -> Job:
    """Check the request of a backward pass. Raises ShapeMismatch."""
    check_upstream(request.upstream, kept.bound)

    def operation(bound: BoundRequest) -> BackwardPass:
        return BackwardPass(kept, request)

    prepared = Prepared("gradients", kept.plan, kept.bound.dtype, device.torch, operation, watched=False)
    return Job(prepared, kept.bound, kept.bound.module)


@dataclass(eq=False, slots=True)
class ForwardPass(DeviceOperation):
    """A forward pass whose graph stays."""

    bound: BoundRequest
    request: PassRequest
    targets: Targets
    kernel: str
    backward: Plan

    def upload(self, device: torch.device) -> Uploaded:
        """Copy the inputs to the device."""
        return compute.upload(self.bound, device)

    def launch(self, uploaded: Uploaded) -> Results:
        """Compute the output."""
        graph = graph_of(self.bound, self.targets, uploaded, self.kernel)
        ranks = {name: getattr(self.request, name).ndim for name in self.targets.inputs}
        bound = self.bound.replaced(arrays={}, learned=dict.fromkeys(self.bound.learned, _NOTHING))
        kept = KeptPass(bound, self.targets, ranks, graph, self.backward)
        return {"output": compute.in_reply(graph.output, self.bound, "output"), "kept": kept}


@dataclass(eq=False, slots=True)
class BackwardPass(DeviceOperation):
    """The backward pass of a kept one."""

    kept: KeptPass
    request: BackwardRequest

    def upload(self, device: torch.device) -> Uploaded:
        """Copy ∂L/∂output to the device."""
        output = self.kept.graph.output
        return Uploaded({UPSTREAM: upstream_of(self.request.upstream, self.kept.bound, output.dtype, device)})

    def launch(self, uploaded: Uploaded) -> Results:
        """Compute the gradients, which frees the graph."""
        kept = self.kept
        gradients = differentiate(kept.graph, kept.targets, {UPSTREAM: uploaded.tensors.pop(UPSTREAM)})
        inputs = {name: as_sent(gradients[name], kept.bound, rank) for name, rank in kept.ranks.items()}
        return {"gradients": {name: x.detach() for name, x in gradients.items()} | inputs}

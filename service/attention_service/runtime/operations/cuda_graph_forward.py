"""Forward pass of a module for capture as a CUDA graph (``graphs``): the output alone."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention_contract.schemas.attention import ForwardRequest
from attention_service.core.attention import attend
from attention_service.core.kernels import KERNELS
from attention_service.core.masks.global_projections import separate_positions
from attention_service.core.methods import METHODS
from attention_service.core.nonfinite_keys import sum_of
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.device.cuda_graphs import Tensors
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import compute
from attention_service.runtime.scheduling.operation import Fields, Results, Uploaded, on_host

_INPUTS = {"query", "key", "value"}


def takes(bound: BoundRequest, request: ForwardRequest, kernel: str) -> bool:
    """True if a graph gives all that a request asks a module for."""
    return bound.module is not None and not bound.learned and asks_for_little(bound, request, kernel)


def asks_for_little(bound: BoundRequest, request: ForwardRequest, kernel: str) -> bool:
    """True if a request asks for the output alone, of inputs alone, by one call of the fused kernel."""
    plain = list(request.return_) == ["output"] and set(bound.arrays) <= _INPUTS
    single_call = kernel in KERNELS and KERNELS[kernel].make().single_call  # a method has no kernel
    changed = request.edits or request.compare or request.dropout or request.report_error or bound.state_wanted
    return single_call and plain and not changed and not separate_positions(bound.spec.masks)


@dataclass(eq=False, slots=True)
class Graphed:
    """The forward pass of a module, launched as one CUDA graph once its shape has come often."""

    bound: BoundRequest
    kernel: str
    need: int
    """Bytes that the pass holds at its peak."""
    device: Device

    def upload(self, device: torch.device) -> Uploaded:
        """Copy the inputs to the device."""
        return compute.upload(self.bound, device)

    @torch.inference_mode()
    def launch(self, uploaded: Uploaded) -> Results:
        """Replay the graph, or run the pass operation by operation. The next replay overwrites the results."""
        bound, module, parameters = self.bound, self.bound.module, uploaded.parameters
        if module is None:
            raise TypeError("raw attention has no module to keep a graph of; ask `takes` first")
        sizes = replace(bound, arrays={})  # a graph outlives the request and must not hold its body

        def passed(tensors: Tensors) -> tuple[Tensor, Tensor]:
            problem = compute.problem(sizes, dict(tensors), parameters)
            context = METHODS.of(sizes.spec.method).attend(problem, KERNELS[self.kernel].make(), (), ())["context"]
            return compute.output(sizes, parameters, context), sum_of(problem.k, problem.v)

        tensors = uploaded.tensors
        output, told = self.device.graphs.run(module, self.kernel, self.need, passed, tensors)
        if not math.isfinite(told):  # only the queries that may look at a key that is not finite give NaN
            problem = compute.problem(sizes, tensors, parameters)
            output = compute.output(sizes, parameters, attend(problem, (), kernel=self.kernel).context)
        return {"output": compute.in_reply(output, bound, "output")}

    def collect(self, results: Results) -> Fields:
        """Copy the output to the host."""
        return on_host(results)

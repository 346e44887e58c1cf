"""One differentiable pass and its gradients, of first and second order."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention_contract.tensors import Array
from attention_service.core.attention import attend, trace
from attention_service.core.kernels import Kernel
from attention_service.core.pullback import pullback
from attention_service.core.types import Problem, Selection
from attention_service.runtime.binding.bound import Bound
from attention_service.runtime.operations import compute
from attention_service.runtime.operations.operation import Uploaded
from attention_service.runtime.operations.recurrent import NAMES

INPUTS = ("query", "key", "value", "mask", "past_key", "past_value", *NAMES)
TAPS = ("q", "k", "v", "scores", "capped_scores", "masked_scores", "weights", "context")


@dataclass(frozen=True)
class Targets:
    """The subjects of gradients, by kind."""

    inputs: tuple[str, ...]
    taps: tuple[str, ...]
    parameters: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.inputs, *self.taps, *self.parameters)


@dataclass(frozen=True)
class Graph:
    """One differentiable pass: the output, and the tensors that stand under each name."""

    output: Tensor
    at: dict[str, Tensor]


def upstream_of(upstream: Array | None, bound: Bound, dtype: torch.dtype, device: torch.device) -> Tensor:
    """∂L/∂output as it was sent, batched, on the device; ones where it was not."""
    if upstream is None:
        return torch.ones(bound.output_shape, dtype=dtype, device=device)
    return compute.converted(upstream, "upstream", device, dtype).reshape(bound.output_shape)


def graph_of(bound: Bound, targets: Targets, uploaded: Uploaded, kernel: str | Kernel) -> Graph:
    """One pass from fresh leaves: through the trace if a tap is a target, through the kernel otherwise."""
    tensors, parameters, edits = dict(uploaded.tensors), dict(uploaded.parameters), uploaded.edits
    leaves = {name: tensors[name].detach().requires_grad_() for name in targets.inputs}
    leaves |= {name: parameters[name].detach().requires_grad_() for name in targets.parameters}
    tensors |= {name: leaves[name] for name in targets.inputs}
    parameters |= {name: leaves[name] for name in targets.parameters}
    problem = compute.problem(bound, tensors, parameters)
    if targets.taps:
        taps = trace(_on_graph(problem), edits)
        output = compute.output(bound, parameters, taps["context"], edits)
        return Graph(output, leaves | {name: taps[name] for name in targets.taps})
    context = attend(problem, (), Selection(), edits, kernel).context
    del problem  # the graph keeps what of it is needed
    return Graph(compute.output(bound, parameters, context, edits), leaves)


def _on_graph(problem: Problem) -> Problem:
    """Return the problem with q, k and v as separate nodes: one tensor may have several roles, or no graph yet."""
    q, k, v = (
        role.view_as(role) if role.requires_grad else role.detach().requires_grad_()
        for role in (problem.q, problem.k, problem.v)
    )
    return replace(problem, q=q, k=k, v=v)


def differentiate(graph: Graph, targets: Targets, upstream: Tensor, *, again: bool = False) -> dict[str, Tensor]:
    """∂L/∂name for every target; zeros for one that the output does not depend on. ``again``: to be differentiated."""
    at = [graph.at[name] for name in targets.names]
    if not graph.output.requires_grad:  # it depends on none of the targets
        return {name: torch.zeros_like(x) for name, x in zip(targets.names, at, strict=True)}
    return dict(zip(targets.names, pullback(graph.output, at, upstream, again=again), strict=True))


def hessian_products(
    graph: Graph, gradients: Mapping[str, Tensor], directions: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """∂/∂name of Σ ⟨∂L/∂other, d_other⟩ (Pearlmutter 1994, by a second backward pass)."""
    along = graph.output.new_zeros(())
    for name, direction in directions.items():
        along = along + (gradients[name] * direction.reshape(gradients[name].shape)).sum()
    at = [graph.at[name] for name in gradients]
    if not along.requires_grad:  # L is linear in all of them
        return {name: torch.zeros_like(x) for name, x in zip(gradients, at, strict=True)}
    found = torch.autograd.grad(along, at, materialize_grads=True, allow_unused=True)
    return dict(zip(gradients, found, strict=True))

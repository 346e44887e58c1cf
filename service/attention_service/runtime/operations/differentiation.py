"""One differentiable pass and its gradients, of first and second order."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attention_contract.tensors import Array
from attention_service.core.attention import attend, trace
from attention_service.core.edits import AXES
from attention_service.core.kernels import Kernel
from attention_service.core.masks.visibility import real_keys
from attention_service.core.nonfinite_keys import without_nonfinite_padding
from attention_service.core.problem import Problem, Selection
from attention_service.core.pullback import pullback
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.binding.recurrence_binding import NAMES
from attention_service.runtime.operations import compute
from attention_service.runtime.scheduling.operation import Uploaded

INPUTS = ("query", "key", "value", "mask", "past_key", "past_value", *NAMES)
TAPS = ("q", "k", "v", "scores", "capped_scores", "masked_scores", "weights", "context")
UPSTREAM = "upstream"
_TAP_UPSTREAM = "tap_upstream."


@dataclass(frozen=True)
class Targets:
    """The subjects of gradients, by kind."""

    inputs: tuple[str, ...]
    taps: tuple[str, ...]
    parameters: tuple[str, ...]
    upstreams: tuple[str, ...] = ()
    """``upstream``, ``tap_upstream.weights`` and its like: their gradients are the output and the taps."""

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.inputs, *self.taps, *self.parameters, *self.upstreams)


@dataclass(frozen=True)
class AutogradGraph:
    """One differentiable pass: the output, and the tensors that stand under each name."""

    output: Tensor
    at: dict[str, Tensor]
    taps: dict[str, Tensor] = field(default_factory=dict)
    """The taps that L depends on beside the output."""
    real: Tensor | None = None
    """Bool ``[B, K]``: the keys that are no padding; None if all are, and without such taps."""

    def counted(self, upstreams: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The upstream gradients as L has them: a padded key counts as 0 in every tap, and so adds nothing to it."""
        return {name: self._of_real_keys(tap_of(name), upstream) for name, upstream in upstreams.items()}

    def _of_real_keys(self, tap: str | None, upstream: Tensor) -> Tensor:
        dim = None if tap is None else AXES[tap].get("keys")
        if self.real is None or dim is None:
            return upstream
        padded = ~(self.real[:, None, :, None] if dim == 2 else self.real[:, None, None, :])
        return upstream.masked_fill(padded, 0)

    def of(self, upstream: str) -> Tensor:
        """The output or the tap that this is the upstream gradient of."""
        return self.output if upstream == UPSTREAM else self.taps[tap_of(upstream) or upstream]


def upstream_of(upstream: Array | None, bound: BoundRequest, dtype: torch.dtype, device: torch.device) -> Tensor:
    """∂L/∂output as it was sent, batched, on the device; ones where it was not."""
    if upstream is None:
        return torch.ones(bound.output_shape, dtype=dtype, device=device)
    return compute.placed(upstream, UPSTREAM, device, dtype, bound.output_shape)


def tap_upstream(tap: str) -> str:
    """The name of ∂L/∂tap among the fields of a request."""
    return f"{_TAP_UPSTREAM}{tap}"


def tap_of(name: str) -> str | None:
    """The tap of which this is the upstream gradient; None for another name."""
    return name.removeprefix(_TAP_UPSTREAM) if name.startswith(_TAP_UPSTREAM) else None


def graph_of(
    bound: BoundRequest, targets: Targets, uploaded: Uploaded, kernel: str | Kernel, given: Collection[str] = ()
) -> AutogradGraph:
    """One pass from fresh leaves: through the trace if a tap is a target or given, through the kernel otherwise.

    given: the taps that L depends on beside the output.
    """
    tensors, parameters, edits = dict(uploaded.tensors), dict(uploaded.parameters), uploaded.edits
    leaves = {name: tensors[name].detach().requires_grad_() for name in targets.inputs}
    leaves |= {name: parameters[name].detach().requires_grad_() for name in targets.parameters}
    tensors |= {name: leaves[name] for name in targets.inputs}
    parameters |= {name: leaves[name] for name in targets.parameters}
    problem = compute.problem(bound, without_nonfinite_padding(tensors), parameters)
    if targets.taps or given:
        taps = trace(_on_graph(problem), edits, {*targets.taps, *given})
        output = compute.output(bound, parameters, taps["context"], edits)
        at = leaves | {name: taps[name] for name in targets.taps}
        return AutogradGraph(output, at, {name: taps[name] for name in given}, real_keys(problem) if given else None)
    context = attend(problem, (), Selection(), edits, kernel).context
    del problem  # the graph keeps what of it is needed
    return AutogradGraph(compute.output(bound, parameters, context, edits), leaves)


def _on_graph(problem: Problem) -> Problem:
    """Return the problem with q, k and v as separate nodes: one tensor may have several roles, or no graph yet."""
    q, k, v = (
        role.view_as(role) if role.requires_grad else role.detach().requires_grad_()
        for role in (problem.q, problem.k, problem.v)
    )
    return replace(problem, q=q, k=k, v=v)


def differentiate(
    graph: AutogradGraph, targets: Targets, upstreams: Mapping[str, Tensor], *, again: bool = False
) -> dict[str, Tensor]:
    """∂L/∂name for every target; zeros for one that L does not depend on. ``again``: to be differentiated.

    upstreams: ∂L/∂output as ``upstream``, and ∂L/∂tap of each of the graph's taps.
    """
    of = {name: graph.of(name) for name in upstreams}
    names = (*targets.inputs, *targets.taps, *targets.parameters)
    at = [graph.at[name] for name in names]
    of_upstreams = {name: of[name] for name in targets.upstreams}
    through = {name: x for name, x in of.items() if x.requires_grad}
    if not through:  # L depends on none of the targets
        return {name: torch.zeros_like(x) for name, x in zip(names, at, strict=True)} | of_upstreams
    pulled = pullback(
        [*through.values()], at, [upstreams[name].expand_as(x) for name, x in through.items()], again=again
    )
    return dict(zip(names, pulled, strict=True)) | of_upstreams


def hessian_products(
    graph: AutogradGraph,
    gradients: Mapping[str, Tensor],
    upstreams: Mapping[str, Tensor],
    directions: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """∂/∂name of Σ ⟨∂L/∂other, d_other⟩ (Pearlmutter 1994, by a second backward pass)."""
    at_all = {**graph.at, **upstreams}
    along = graph.output.new_zeros(())
    for name, direction in directions.items():
        along = along + (gradients[name] * direction.reshape(gradients[name].shape)).sum()
    at = [at_all[name] for name in gradients]
    if not along.requires_grad:  # L is linear in all of them
        return {name: torch.zeros_like(x) for name, x in zip(gradients, at, strict=True)}
    products = torch.autograd.grad(along, at, materialize_grads=True, allow_unused=True)
    return dict(zip(gradients, products, strict=True))

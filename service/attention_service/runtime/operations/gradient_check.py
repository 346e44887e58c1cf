"""Gradients held against central differences, both in float64."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention_contract.schemas.gradients import GradientCheck, GradientsRequest
from attention_service.core.attention import attend
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels import MATERIALIZED
from attention_service.core.types import Selection
from attention_service.runtime.binding.bound import Bound
from attention_service.runtime.operations import compute
from attention_service.runtime.operations.differentiation import (
    INPUTS,
    TAPS,
    Targets,
    differentiate,
    graph_of,
    upstream_of,
)
from attention_service.runtime.operations.operation import Uploaded

CHECKED_ELEMENTS = 16
"""Elements of each name that the check compares: half of them those of the largest gradient, half drawn."""
CHECK_FLOOR = 1e-3
"""Below this, errors are taken relative to it: central differences have about ten digits after the point, no more."""


def check(
    bound: Bound, request: GradientsRequest, targets: Targets, device: torch.device, most: int = CHECKED_ELEMENTS
) -> dict[str, GradientCheck]:
    """Every gradient against central differences, both in float64: (f(x + h) − f(x − h)) / 2h, h = 1e-5·max(1, |x|)."""
    double = torch.float64
    normalizer = bound.spec.normalizer.model_copy(update={"dtype": "float64"})
    bound = replace(bound, spec=bound.spec.model_copy(update={"normalizer": normalizer}))
    edits = compute.bind_edits(request.edits, device, double)
    uploaded = Uploaded(compute.load(bound, device, double), compute.load_parameters(bound, device, double), edits)
    graph = graph_of(bound, targets, uploaded, MATERIALIZED)
    uploaded.tensors.clear()
    upstream = upstream_of(request.upstream, bound, double, device)
    gradients = differentiate(graph, targets, upstream)
    tensors, parameters = compute.load(bound, device, double), dict(compute.load_parameters(bound, device, double))

    def probe(name: str) -> _Probe:
        return _probe(bound, name, graph.at[name].detach(), edits, tensors, parameters)

    with torch.no_grad():
        return {name: _compare(probe(name), gradient, upstream, most) for name, gradient in gradients.items()}


@dataclass(frozen=True)
class _Probe:
    """The output as a function of one named tensor, the rest held."""

    at: Tensor
    output: Callable[[Tensor], Tensor]


def _probe(
    bound: Bound,
    name: str,
    at: Tensor,
    edits: Sequence[BoundEdit],
    tensors: dict[str, Tensor],
    parameters: dict[str, Tensor],
) -> _Probe:
    def output(value: Tensor) -> Tensor:
        changed = edits
        if name in TAPS:  # resume from the tap: put the changed value in its place, after all that was asked for
            changed = [*edits, BoundEdit(name, value=value)]
        inputs = tensors | {name: value} if name in INPUTS else tensors
        held = parameters | {name: value} if name in parameters else parameters
        context = attend(compute.problem(bound, inputs, held), (), Selection(), changed, MATERIALIZED).context
        return compute.output(bound, held, context, edits)

    return _Probe(at, output)


def _compare(probe: _Probe, gradient: Tensor, upstream: Tensor, most: int) -> GradientCheck:
    flat = gradient.flatten()
    worst = largest = 0.0
    elements = _sample(flat)[:most]
    for index in elements:
        at = probe.at.flatten()
        centre = float(at[index])
        step = 1e-5 * max(1.0, abs(centre)) if math.isfinite(centre) else 1e-5
        ends = []
        for sign in (1, -1):
            moved = at.clone()
            moved[index] = centre + sign * step
            ends.append(probe.output(moved.view_as(probe.at)))
        # The difference first, the sum after it: what did not change cancels exactly.
        numeric = float((upstream * (ends[0] - ends[1])).sum()) / (2 * step)
        error = abs(numeric - float(flat[index]))
        worst = max(worst, error) if math.isfinite(error) else math.inf  # NaN would be passed over by max
        largest = max(largest, abs(numeric), abs(float(flat[index])))
    return GradientCheck(
        max_absolute_error=worst,
        max_relative_error=worst / max(largest, CHECK_FLOOR),
        elements=len(elements),
        passed=worst <= 1e-6 * max(largest, CHECK_FLOOR),
    )


def _sample(gradient: Tensor) -> list[int]:
    """Where to compare: the largest elements, and some drawn from a fixed seed so that a check can be repeated."""
    count = gradient.numel()
    if count <= CHECKED_ELEMENTS:
        return list(range(count))
    half = CHECKED_ELEMENTS // 2
    largest = gradient.abs().topk(half).indices
    drawn = torch.randint(count, (half,), generator=torch.Generator().manual_seed(0)).tolist()
    return sorted({*(int(index) for index in largest), *drawn})

"""Gradients held against central differences, both in float64."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from attention_contract.schemas.gradients import GradientCheck, GradientsRequest
from attention_service.core.attention import attend
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels import MATERIALIZED
from attention_service.core.problem import Selection
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.operations import compute
from attention_service.runtime.operations.central_differences import (
    CHECK_FLOOR,
    TOLERANCE,
    Derivative,
    derivative,
    verdict,
)
from attention_service.runtime.operations.differentiation import (
    INPUTS,
    TAPS,
    UPSTREAM,
    Targets,
    differentiate,
    graph_of,
    upstream_of,
)
from attention_service.runtime.scheduling.operation import Uploaded

CHECKED_ELEMENTS = 16
"""Elements of each name that the check compares: half of them those of the largest gradient, half drawn."""
_FIRST_STEP = 1e-3
"""First step, at most, relative to max(1, |x|)."""
_ROUNDING = 1e-13
"""Smallest step, relative to |x|: below, x + h is too coarse."""


def check(
    bound: BoundRequest, request: GradientsRequest, targets: Targets, device: torch.device, most: int = CHECKED_ELEMENTS
) -> dict[str, GradientCheck]:
    """Compare every gradient with extrapolated central differences, both in float64. ``most``: elements of each."""
    double, targets = torch.float64, replace(targets, upstreams=())
    normalizer = bound.spec.normalizer.model_copy(update={"dtype": "float64"})
    bound = replace(bound, spec=bound.spec.model_copy(update={"normalizer": normalizer}))
    edits = compute.bind_edits(request.edits, device, double)
    uploaded = Uploaded(compute.load(bound, device, double), compute.load_parameters(bound, device, double), edits)
    graph = graph_of(bound, targets, uploaded, MATERIALIZED)
    uploaded.tensors.clear()
    upstream = upstream_of(request.upstream, bound, double, device)
    gradients = differentiate(graph, targets, {UPSTREAM: upstream})
    tensors, parameters = compute.load(bound, device, double), dict(compute.load_parameters(bound, device, double))

    with torch.no_grad():
        size = float((upstream * graph.output).abs().sum())
        probes = {name: _probe(bound, name, graph.at[name].detach(), edits, tensors, parameters) for name in gradients}
        return {name: _compare(probes[name], gradient, upstream, size, most) for name, gradient in gradients.items()}


@dataclass(frozen=True)
class _Probe:
    """The output as a function of one named tensor, the rest held."""

    at: Tensor
    output: Callable[[Tensor], Tensor]


def _probe(
    bound: BoundRequest,
    name: str,
    at: Tensor,
    edits: Sequence[BoundEdit],
    tensors: dict[str, Tensor],
    parameters: dict[str, Tensor],
) -> _Probe:
    def output(value: Tensor) -> Tensor:
        changed = edits
        if name in TAPS:  # resume from the tap: the changed value replaces it, after the request's edits
            changed = [*edits, BoundEdit(name, value=value)]
        inputs = tensors | {name: value} if name in INPUTS else tensors
        held = parameters | {name: value} if name in parameters else parameters
        context = attend(compute.problem(bound, inputs, held), (), Selection(), changed, MATERIALIZED).context
        return compute.output(bound, held, context, edits)

    return _Probe(at, output)


def _compare(probe: _Probe, gradient: Tensor, upstream: Tensor, size: float, most: int) -> GradientCheck:
    """Compare a sample of the elements. ``size``: Σ |upstream · output|."""
    flat = gradient.flatten()
    elements = _sample(flat)[:most]
    expected = [float(flat[index]) for index in elements]
    largest = max([CHECK_FLOOR, *(abs(x) for x in expected)])
    numeric = [
        _derivative(probe, index, upstream, largest, size, own) for index, own in zip(elements, expected, strict=True)
    ]
    return verdict(expected, numeric)


def _derivative(
    probe: _Probe, index: int, upstream: Tensor, largest: float, size: float, expected: float
) -> Derivative:
    """Differentiate along one element.

    The first step changes the output by no more than its own size, if ``largest`` is the largest gradient.
    """
    centre = float(probe.at.flatten()[index])
    unit = max(1.0, abs(centre)) if math.isfinite(centre) else 1.0
    step = min(_FIRST_STEP * unit, size / largest) if 0 < size < math.inf and largest < math.inf else _FIRST_STEP * unit
    return derivative(
        partial(_difference, probe, index, upstream),
        step,
        least=_ROUNDING * abs(centre) if math.isfinite(centre) else 0.0,
        rounding=sys.float_info.epsilon * size,
        enough=0.1 * TOLERANCE * largest,
        expected=expected,
    )


def _difference(probe: _Probe, index: int, upstream: Tensor, step: float) -> float:
    """(f(x + h) − f(x − h)) / 2h, where 2h is the distance of the rounded points; NaN if they are the same."""
    ends, points = [], []
    for sign in (1, -1):
        moved = probe.at.flatten().clone()
        moved[index] += sign * step
        points.append(float(moved[index]))
        ends.append(probe.output(moved.view_as(probe.at)))
    distance = points[0] - points[1] if math.isfinite(points[0]) else 2 * step
    # Subtract before summing: what did not change cancels exactly.
    change = float((upstream * (ends[0] - ends[1])).sum())
    return change / distance if distance else math.nan


def _sample(gradient: Tensor) -> list[int]:
    """Return the largest elements, and some drawn from a fixed seed so that a check is repeatable."""
    count = gradient.numel()
    if count <= CHECKED_ELEMENTS:
        return list(range(count))
    half = CHECKED_ELEMENTS // 2
    largest = gradient.abs().topk(half).indices
    drawn = torch.randint(count, (half,), generator=torch.Generator().manual_seed(0)).tolist()
    return sorted({*(int(index) for index in largest), *drawn})

"""Gradients: ∂L/∂ of inputs, taps and parameters, from a given ∂L/∂output, and their check by central differences."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention_contract.errors import InvalidRequest, ShapeMismatch
from attention_contract.schemas.attention import GradientCheck, GradientsRequest
from attention_contract.tensors import Array
from attention_service.core.arrays import TORCH_DTYPES, to_numpy
from attention_service.core.attention import attend, trace
from attention_service.core.edits import BoundEdit
from attention_service.core.types import Problem, Selection
from attention_service.modules.resident import Module
from attention_service.runtime import compute
from attention_service.runtime.binding import Bound, bind, strip
from attention_service.runtime.device import Device
from attention_service.runtime.forward import dropout_fields, tap_fields
from attention_service.runtime.jobs import Fields, Job
from attention_service.runtime.planning import Purpose, choose_kernel, plan_gradients, workload
from attention_service.runtime.running import NAMES
from attention_service.runtime.selecting import bind_selection, check_edits, check_tap, check_taps

INPUTS = ("query", "key", "value", "mask", "past_key", "past_value", *NAMES)
TAPS = ("q", "k", "v", "scores", "capped_scores", "masked_scores", "weights", "context")
CHECKED_ELEMENTS = 16
"""Elements of each name that the check compares: half of them those of the largest gradient, half drawn."""
CHECK_FLOOR = 1e-3
"""Below this, errors are taken relative to it: central differences have about ten digits after the point, no more."""


@dataclass(frozen=True)
class _Targets:
    """What to differentiate with respect to, by kind."""

    inputs: tuple[str, ...]
    taps: tuple[str, ...]
    parameters: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.inputs, *self.taps, *self.parameters)


@dataclass(frozen=True)
class _Graph:
    """One differentiable pass: the output, and the tensors that stand under each name."""

    output: Tensor
    at: dict[str, Tensor]


def prepare(module: Module | None, request: GradientsRequest, device: Device, room: int) -> Job:
    """Bind and plan one forward and backward pass. Raises an InvalidRequest that names the field at fault.

    ``room``: the bytes that it may need at most, which bear on the kernel.
    """
    bound = bind(module, request)
    check_taps(request.return_, bound.spec)
    selection = bind_selection(request.select, bound)
    check_edits(request.edits, bound)
    targets = _targets(request.wrt, bound)
    _check_upstream(request.upstream, bound)
    _check_directions(request, targets, bound)
    work = workload(bound, device, request.return_, selection, edited=bool(request.edits))
    taps = bool(targets.taps)
    twice = request.directions is not None
    purpose = Purpose(keeps_weights=taps, gradient=True, mask_gradient="mask" in targets.inputs, double_backward=twice)
    kernel = choose_kernel(work, bound.dtype, device, request.kernel, room, purpose)
    checks = 2 * CHECKED_ELEMENTS * len(targets.names) if request.check else 0
    plan = plan_gradients(
        work, kernel, device.rates, taps=taps, mask="mask" in targets.inputs, checks=checks, twice=twice
    )
    return Job(plan, bound.dtype, module, lambda: _run(bound, request, selection, targets, kernel, device.torch))


def _targets(wrt: Sequence[str], bound: Bound) -> _Targets:
    """Sort the names asked for by kind. Raises InvalidRequest for one that has no gradient here."""
    parameters = tuple(bound.module.parameters if bound.module is not None else bound.learned)
    wanted: dict[str, None] = {}
    for index, name in enumerate(wrt):
        param = f"wrt.{index}"
        if name == "parameters" and parameters:
            wanted.update(dict.fromkeys(parameters))
            continue
        if name in INPUTS and name not in bound.arrays:
            because = (
                "the query takes its place, and its gradient is part of the query's" if name in {"key", "value"} else ""
            )
            raise InvalidRequest(
                f"{param}: {name} was not sent{'; ' if because else ''}{because}; send {name} or leave it out of wrt",
                param=param,
            )
        if name == "mask" and bound.arrays["mask"].dtype.kind == "b":
            raise InvalidRequest(
                f"{param}: the mask is boolean; only a floating-point mask has a gradient", param=param
            )
        if name not in (*INPUTS, *TAPS, *parameters):
            known = ", ".join((*INPUTS, *TAPS, *(("parameters", *parameters) if parameters else ())))
            raise InvalidRequest(f"{param}: {name[:80]!r} is not known; expected one of {known}", param=param)
        if name in TAPS:
            check_tap(name, bound.spec, param)
        wanted[name] = None
    return _Targets(
        tuple(name for name in wanted if name in INPUTS),
        tuple(name for name in wanted if name in TAPS),
        tuple(name for name in wanted if name in parameters),
    )


def _check_upstream(upstream: Array | None, bound: Bound) -> None:
    if upstream is None:
        return
    expected = strip(
        torch.empty(bound.output_shape, device="meta"), bound.layout, heads_axis=compute.has_heads("output", bound)
    )
    if tuple(upstream.shape) != tuple(expected.shape):
        raise ShapeMismatch(
            f"upstream: expected the output's shape {list(expected.shape)}, got {list(upstream.shape)}",
            param="upstream",
            expected=list(expected.shape),
            actual=list(upstream.shape),
        )


def _check_directions(request: GradientsRequest, targets: _Targets, bound: Bound) -> None:
    """Raise InvalidRequest for a direction of something else than wrt, ShapeMismatch for one of another shape."""
    for name, direction in (request.directions or {}).items():
        param = f"directions.{name[:80]}"
        if name not in targets.names:
            raise InvalidRequest(
                f"{param}: wrt does not list it; add it there, or leave it out; wrt has {', '.join(targets.names)}",
                param=param,
            )
        expected = getattr(request, name).shape if name in INPUTS else _shape(name, bound)
        if direction.shape != expected:
            raise ShapeMismatch(
                f"{param}: expected the shape of {name}, {list(expected)}, got {list(direction.shape)}",
                param=param,
                expected=list(expected),
                actual=list(direction.shape),
            )


def _shape(name: str, bound: Bound) -> tuple[int, ...]:
    """The shape of a parameter, or of a tap as it would be returned."""
    if name not in TAPS:
        return tuple((bound.learned if bound.module is None else bound.module.parameters)[name].shape)
    heads, keys = (bound.kv_heads if name in {"k", "v"} else bound.heads), bound.keys
    widths = {"q": bound.head_dim, "k": bound.head_dim, "v": bound.value_dim, "context": bound.value_dim}
    length = keys if name in {"k", "v"} else bound.queries
    whole = torch.empty(bound.batch, heads, length, widths.get(name, keys), device="meta")
    return tuple(strip(whole, bound.layout, heads_axis=True).shape)


def _run(
    bound: Bound,
    request: GradientsRequest,
    selection: Selection,
    targets: _Targets,
    kernel: str,
    device: torch.device,
) -> Fields:
    dtype = TORCH_DTYPES[bound.dtype]
    edits = compute.bind_edits(request.edits, device, dtype)
    upstream = _upstream(request.upstream, bound, dtype, device)
    graph = _graph(bound, targets, edits, kernel, dtype, device)
    gradients = _differentiate(graph, targets, upstream, again=request.directions is not None)
    fields: Fields = {"gradients": {name: _answer(name, value, bound) for name, value in gradients.items()}}
    if request.directions is not None:
        products = _hessian_products(graph, gradients, request.directions, dtype)
        fields["hessian_products"] = {name: _answer(name, value, bound) for name, value in products.items()}
        del products
    if "output" in request.return_:
        fields["output"] = compute.answer(graph.output, bound, "output")
    inner = [tap for tap in request.return_ if tap != "output"]
    if inner or request.dropout is not None:
        with torch.no_grad():
            problem = compute.problem(bound, compute.load(bound, device), compute.load_parameters(bound, device))
            taps = attend(problem, inner, selection, edits, kernel).taps if inner else {}
        fields |= tap_fields(bound, taps, average_heads=request.average_heads)
        fields |= dropout_fields(bound, request, problem, selection)
    if request.check:
        fields["check"] = _check(bound, request, targets, device)
    return fields


def _upstream(upstream: Array | None, bound: Bound, dtype: torch.dtype, device: torch.device) -> Tensor:
    if upstream is None:
        return torch.ones(bound.output_shape, dtype=dtype, device=device)
    return compute.converted(upstream, "upstream", device, dtype).reshape(bound.output_shape)


def _graph(
    bound: Bound,
    targets: _Targets,
    edits: Sequence[BoundEdit],
    kernel: str,
    dtype: torch.dtype,
    device: torch.device,
) -> _Graph:
    """One pass from fresh leaves; through the trace where a tap is a target, through the kernel otherwise."""
    tensors = compute.load(bound, device, dtype)
    parameters = compute.load_parameters(bound, device, dtype)
    leaves = {name: tensors[name].detach().requires_grad_() for name in targets.inputs}
    leaves |= {name: parameters[name].detach().requires_grad_() for name in targets.parameters}
    tensors |= {name: leaves[name] for name in targets.inputs}
    parameters |= {name: leaves[name] for name in targets.parameters}
    problem = compute.problem(bound, tensors, parameters)
    if targets.taps:
        taps = trace(_on_graph(problem), edits)
        output = compute.output(bound, parameters, taps["context"], edits)
        return _Graph(output, leaves | {name: taps[name] for name in targets.taps})
    attended = attend(problem, (), Selection(), edits, kernel)
    return _Graph(compute.output(bound, parameters, attended.context, edits), leaves)


def _on_graph(problem: Problem) -> Problem:
    """The problem with q, k and v as nodes of their own: one tensor may stand in several roles, or in no graph yet."""
    q, k, v = (
        role.view_as(role) if role.requires_grad else role.detach().requires_grad_()
        for role in (problem.q, problem.k, problem.v)
    )
    return replace(problem, q=q, k=k, v=v)


def _differentiate(graph: _Graph, targets: _Targets, upstream: Tensor, *, again: bool = False) -> dict[str, Tensor]:
    """∂L/∂name for every target; zeros for one that the output does not depend on. ``again``: to be differentiated."""
    at = [graph.at[name] for name in targets.names]
    found = torch.autograd.grad(
        graph.output, at, upstream, create_graph=again, materialize_grads=True, allow_unused=True
    )
    return dict(zip(targets.names, found, strict=True))


def _hessian_products(
    graph: _Graph, gradients: Mapping[str, Tensor], directions: Mapping[str, Array], dtype: torch.dtype
) -> dict[str, Tensor]:
    """∂/∂name of Σ ⟨∂L/∂other, d_other⟩ (Pearlmutter 1994, by a second backward pass)."""
    along = graph.output.new_zeros(())
    for name, direction in directions.items():
        d = compute.converted(direction, f"directions.{name}", graph.output.device, dtype)
        along = along + (gradients[name] * d.reshape(gradients[name].shape)).sum()
    at = [graph.at[name] for name in gradients]
    if not along.requires_grad:  # L is linear in all of them
        return {name: torch.zeros_like(x) for name, x in zip(gradients, at, strict=True)}
    found = torch.autograd.grad(along, at, materialize_grads=True, allow_unused=True)
    return dict(zip(gradients, found, strict=True))


def _answer(name: str, gradient: Tensor, bound: Bound) -> Array:
    """A gradient in the shape of what it is with respect to: a tensor as it was sent, a tap as it would be returned."""
    if name in TAPS:
        return compute.answer(gradient, bound, name)
    gradient = gradient.detach()
    if name not in INPUTS:  # a parameter's is in the dtype that is computed in
        return to_numpy(gradient)
    gradient = gradient.to(TORCH_DTYPES[bound.reply_dtype])
    return to_numpy(gradient if name == "mask" else strip(gradient, bound.layout, heads_axis=_has_heads(name, bound)))


def _has_heads(name: str, bound: Bound) -> bool:
    return name.startswith("past_") or name in NAMES or (bound.module is None and not bound.layout.merged)


def _check(
    bound: Bound, request: GradientsRequest, targets: _Targets, device: torch.device
) -> dict[str, GradientCheck]:
    """Every gradient against central differences, both in float64: (f(x + h) − f(x − h)) / 2h, h = 1e-5·max(1, |x|)."""
    double = torch.float64
    edits = compute.bind_edits(request.edits, device, double)
    upstream = _upstream(request.upstream, bound, double, device)
    graph = _graph(bound, targets, edits, "materialized", double, device)
    gradients = _differentiate(graph, targets, upstream)
    tensors, parameters = compute.load(bound, device, double), compute.load_parameters(bound, device, double)
    with torch.no_grad():
        return {
            name: _compare(_probe(bound, name, graph.at[name].detach(), edits, tensors, parameters), gradient, upstream)
            for name, gradient in gradients.items()
        }


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
        problem = compute.problem(bound, inputs, held)
        context = attend(problem, (), Selection(), changed, "materialized").context
        return compute.output(bound, held, context, edits)

    return _Probe(at, output)


def _compare(probe: _Probe, gradient: Tensor, upstream: Tensor) -> GradientCheck:
    flat = gradient.flatten()
    worst = largest = 0.0
    elements = _sample(flat)
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
    largest = gradient.abs().topk(half).indices.tolist()
    drawn = torch.randint(count, (half,), generator=torch.Generator().manual_seed(0)).tolist()
    return sorted({*largest, *drawn})

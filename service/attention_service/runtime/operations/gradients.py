"""Gradients: ∂L/∂ of inputs, taps and parameters, from a given ∂L/∂output; of second order along directions."""

from collections.abc import Sequence

import torch

from attention_contract.errors import InvalidRequest, ShapeMismatch
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.tensors import Array
from attention_service.core.arrays import TORCH_DTYPES, to_numpy
from attention_service.core.attention import attend
from attention_service.core.kernels import is_compiled
from attention_service.core.types import Selection
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound import Bound, strip
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.binding.selection import bind_selection, check_edits, check_tap, check_taps
from attention_service.runtime.device import Device
from attention_service.runtime.operations import compute
from attention_service.runtime.operations.differentiation import (
    INPUTS,
    TAPS,
    Targets,
    differentiate,
    graph_of,
    hessian_products,
    upstream_of,
)
from attention_service.runtime.operations.forward import dropout_fields, returns_mask, tap_fields
from attention_service.runtime.operations.gradient_check import CHECKED_ELEMENTS, check
from attention_service.runtime.planning.planner import Purpose, Question, edit_actions, plan_request
from attention_service.runtime.scheduling.jobs import Fields, Job


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
    taps = bool(targets.taps)
    twice = request.directions is not None
    checks = 2 * CHECKED_ELEMENTS * len(targets.names) if request.check else 0
    question = Question(
        purpose=Purpose("gradients", taps, targets.names, twice, checks),
        kernel=request.kernel,
        taps=frozenset(request.return_),
        returns_dropout_mask=returns_mask(request),
        edits=edit_actions(request.edits),
        wrt=_kinds_of(targets),
    )
    plan = plan_request(bound, question, device, room, selection, request.edits)
    return Job(
        "gradients",
        plan,
        bound.dtype,
        module,
        lambda: _run(bound, request, selection, targets, plan.kernel, device.torch),
        watched=not (twice or checks or taps or request.edits or is_compiled(plan.kernel) or returns_mask(request)),
    )


def _targets(wrt: Sequence[str], bound: Bound) -> Targets:
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
    return Targets(
        tuple(name for name in wanted if name in INPUTS),
        tuple(name for name in wanted if name in TAPS),
        tuple(name for name in wanted if name in parameters),
    )


def _kinds_of(targets: Targets) -> frozenset[str]:
    """What gradients go back to: taps lie on the way to the inputs."""
    inputs = {"inputs"} if targets.inputs or targets.taps else set()
    return frozenset(inputs | ({"parameters"} if targets.parameters else set()))


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


def _check_directions(request: GradientsRequest, targets: Targets, bound: Bound) -> None:
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
    targets: Targets,
    kernel: str,
    device: torch.device,
) -> Fields:
    dtype = TORCH_DTYPES[bound.dtype]
    edits = compute.bind_edits(request.edits, device, dtype)
    graph = graph_of(bound, targets, edits, kernel, dtype, device)
    upstream = upstream_of(request.upstream, bound, dtype, device)
    gradients = differentiate(graph, targets, upstream, again=request.directions is not None)
    fields: Fields = {"gradients": {name: _answer(name, value, bound, request) for name, value in gradients.items()}}
    if request.directions is not None:
        products = hessian_products(graph, gradients, request.directions, dtype)
        fields["hessian_products"] = {name: _answer(name, value, bound, request) for name, value in products.items()}
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
        fields["check"] = check(bound, request, targets, device)
    return fields


def _answer(name: str, gradient: torch.Tensor, bound: Bound, request: GradientsRequest) -> Array:
    """A gradient in the shape of what it is with respect to: a tensor as it was sent, a tap as it would be returned."""
    if name in TAPS:
        return compute.answer(gradient, bound, name)
    gradient = gradient.detach()
    if name not in INPUTS:  # a parameter's is in the dtype that is computed in
        return to_numpy(gradient)
    return to_numpy(gradient.to(TORCH_DTYPES[bound.reply_dtype]).reshape(getattr(request, name).shape))

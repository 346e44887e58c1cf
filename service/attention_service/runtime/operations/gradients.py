"""Gradients: ∂L/∂ of inputs, taps and parameters, from a given ∂L/∂output; of second order along directions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.tensors import Array
from attention_service import cost
from attention_service.core.attention import attend
from attention_service.core.kernels import Kernel, Needs, is_compiled
from attention_service.core.problem import Selection
from attention_service.core.slices import phase
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound_request import BoundRequest, strip, wrong_shape
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.binding.selection import (
    bind_selection,
    broadcasts,
    check_edits,
    check_tap,
    check_taps,
    computes_pairs,
)
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import compute
from attention_service.runtime.operations.differentiation import (
    INPUTS,
    TAPS,
    UPSTREAM,
    Targets,
    differentiate,
    graph_of,
    hessian_products,
    tap_of,
    tap_upstream,
)
from attention_service.runtime.operations.forward import dropout_results, returns_mask
from attention_service.runtime.operations.gradient_check import CHECKED_ELEMENTS, check
from attention_service.runtime.planning.planner import (
    PlanKey,
    Rehearsed,
    edit_sizes,
    names_tokens,
    plan_request,
    selection_sizes,
)
from attention_service.runtime.scheduling.jobs import Job, Prepared, job_of_request
from attention_service.runtime.scheduling.operation import DeviceOperation, Results, Uploaded


def prepare(module: Module | None, request: GradientsRequest, device: Device, capacity: int) -> Job:
    """Bind and plan one forward and backward pass. Raises an InvalidRequest that names the field at fault."""
    return job_of_request(_planned, bind(module, request), request, device, capacity)


def _planned(bound: BoundRequest, request: GradientsRequest, device: Device, capacity: int) -> Prepared:
    check_taps(request.return_, bound.spec)
    selection = bind_selection(request.select, bound)
    check_edits(request.edits, bound)
    targets = targets_of(request.wrt, tuple(request.tap_upstream or ()), bound)
    check_upstream(request.upstream, bound)
    _check_tap_upstream(request, bound)
    _check_directions(request, targets, bound)
    taps = bool(targets.taps or request.tap_upstream)
    twice = request.directions is not None
    question = PlanKey(
        "gradients",
        kernel=request.kernel,
        needs=Needs(edits=bool(request.edits), taps_gradient=taps, double_backward=twice),
        asks=(
            targets, request.upstream is not None, tuple(request.tap_upstream or ()), tuple(request.directions or ()),
            request.check, frozenset(request.return_), request.average_heads, returns_mask(request),
            selection_sizes(selection), edit_sizes(request.edits),
        ),
        has_sizes=names_tokens(request.edits, selection),
        pairs=computes_pairs(
            bound.spec, [*targets.taps, *(request.tap_upstream or ()), *request.return_], request.edits
        ),
    )  # fmt: skip
    plan = plan_request(bound, question, device, capacity, rehearsed_gradients(request, selection, targets))

    def operation(bound: BoundRequest) -> Gradients:
        return Gradients(bound, request, selection, targets, plan.kernel)

    watched = not (twice or request.check or taps or request.edits or is_compiled(plan.kernel) or returns_mask(request))
    return Prepared("gradients", plan, bound.dtype, device.torch, operation, watched)


def rehearsed_gradients(request: GradientsRequest, selection: Selection, targets: Targets) -> Rehearsed:
    """Return the operation of a request for gradients as the planner rehearses it: a check compares one element."""

    def operate(bound: BoundRequest, kernel: str | Kernel) -> Gradients:
        return Gradients(bound, request, selection, targets, kernel, checked_elements=1)

    bare = request.model_copy(update={"return_": [], "dropout": None, "check": False})

    def plain(bound: BoundRequest, kernel: str | Kernel) -> Gradients:
        return Gradients(bound, bare, selection, targets, kernel)

    wrt, twice = kinds_of(targets), request.directions is not None
    return Rehearsed(
        operate,
        partial(gradient_flops, wrt=wrt, twice=twice),
        {"check": CHECKED_ELEMENTS} if request.check else {},
        plain if request.return_ or request.check or request.dropout is not None else None,
    )


def gradient_flops(bound: BoundRequest, kernel: str, *, wrt: frozenset[str], twice: bool = False) -> int:
    """FLOPs of a forward and a backward pass; ``twice``: differentiated again."""
    backward = cost.executed_backward_flops(bound, kernel, wrt)
    return cost.executed_flops(bound, kernel) + backward * (1 + cost.SECOND_PASSES * twice)


def targets_of(names: Sequence[str], given: Sequence[str], bound: BoundRequest) -> Targets:
    """Sort the names asked for by kind. Raises InvalidRequest for one that has no gradient here.

    given: the taps that L depends on beside the output.
    """
    upstreams = (UPSTREAM, *map(tap_upstream, given))
    parameters = tuple(bound.module.parameters if bound.module is not None else bound.learned)
    wanted: dict[str, None] = {}
    for index, name in enumerate(names):
        param = f"wrt.{index}"
        if name == "parameters" and parameters:
            wanted.update(dict.fromkeys(parameters))
            continue
        if name in INPUTS and name not in bound.arrays:
            because = (
                "the query takes its place, and its gradient is part of the query's" if name in {"key", "value"} else ""
            )
            raise InvalidRequest.at(
                param, f"{name} was not sent{'; ' if because else ''}{because}; send {name} or leave it out of wrt"
            )
        if name == "mask" and bound.arrays["mask"].dtype.kind == "b":
            raise InvalidRequest.at(param, "the mask is boolean; only a floating-point mask has a gradient")
        if name not in (*INPUTS, *TAPS, *parameters, *upstreams):
            known = ", ".join((*INPUTS, *TAPS, *(("parameters", *parameters) if parameters else ()), *upstreams))
            raise InvalidRequest.at(param, f"{name[:80]!r} is not known; expected one of {known}")
        if name in TAPS:
            check_tap(name, bound.spec, param)
        wanted[name] = None
    return Targets(
        tuple(name for name in wanted if name in INPUTS),
        tuple(name for name in wanted if name in TAPS),
        tuple(name for name in wanted if name in parameters),
        tuple(name for name in wanted if name in upstreams),
    )


def kinds_of(targets: Targets) -> frozenset[str]:
    """The kinds of leaves that gradients reach; taps lie on the way to the inputs."""
    inputs = {"inputs"} if targets.inputs or targets.taps else set()
    return frozenset(inputs | ({"parameters"} if targets.parameters else set()))


def check_upstream(upstream: Array | None, bound: BoundRequest) -> None:
    """Raise ShapeMismatch unless ∂L/∂output has the output's shape."""
    if upstream is None:
        return
    expected = _output_shape(bound)
    if upstream.shape != expected:
        raise wrong_shape("upstream", f"the output's shape {list(expected)}", upstream, list(expected))


def _output_shape(bound: BoundRequest) -> tuple[int, ...]:
    whole = torch.empty(bound.output_shape, device="meta")
    return tuple(strip(whole, bound.layout, heads_axis=compute.has_heads("output", bound)).shape)


def _check_tap_upstream(request: GradientsRequest, bound: BoundRequest) -> None:
    """Raise InvalidRequest for something that is no tap with gradients, ShapeMismatch for one of another shape."""
    for tap, upstream in (request.tap_upstream or {}).items():
        param = f"tap_upstream.{tap[:80]}"
        if tap not in TAPS:
            raise InvalidRequest.at(param, f"expected one of {', '.join(TAPS)}; got {tap[:80]!r}")
        check_tap(tap, bound.spec, param)
        expected = subject_shape(tap, bound)
        if not broadcasts(upstream.shape, expected):
            words = f"a shape that broadcasts to that of the tap, {list(expected)}"
            raise wrong_shape(param, words, upstream, list(expected))
    if request.check and request.tap_upstream:
        raise InvalidRequest.at("check", "it supports only L = Σ output · upstream; leave check or tap_upstream out")


def _check_directions(request: GradientsRequest, targets: Targets, bound: BoundRequest) -> None:
    """Raise InvalidRequest for a direction of something else than wrt, ShapeMismatch for one of another shape."""
    for name, direction in (request.directions or {}).items():
        param = f"directions.{name[:80]}"
        if name not in targets.names:
            raise InvalidRequest.at(
                param, f"wrt does not list it; add it there, or leave it out; wrt has {', '.join(targets.names)}"
            )
        expected = tuple(getattr(request, name).shape) if name in INPUTS else subject_shape(name, bound)
        if direction.shape != expected:
            raise wrong_shape(param, f"the shape of {name}, {list(expected)}", direction, list(expected))


def subject_shape(name: str, bound: BoundRequest) -> tuple[int, ...]:
    """The shape of a parameter, of a tap as it would be returned, or of an upstream gradient of a tap or the output."""
    if name == UPSTREAM:
        return _output_shape(bound)
    name = tap_of(name) or name
    if name not in TAPS:
        return tuple((bound.learned if bound.module is None else bound.module.parameters)[name].shape)
    heads, keys = (bound.kv_heads if name in {"k", "v"} else bound.heads), bound.keys
    widths = {"q": bound.head_dim, "k": bound.key_dim, "v": bound.value_dim, "context": bound.value_dim}
    length = keys if name in {"k", "v"} else bound.queries
    whole = torch.empty(bound.batch, heads, length, widths.get(name, keys), device="meta")
    return tuple(strip(whole, bound.layout, heads_axis=True).shape)


@dataclass(eq=False, slots=True)
class Gradients(DeviceOperation):
    """A forward and a backward pass of one request."""

    bound: BoundRequest
    request: GradientsRequest
    selection: Selection
    targets: Targets
    kernel: str | Kernel
    checked_elements: int = CHECKED_ELEMENTS
    """Elements of each gradient that a check compares."""

    def upload(self, device: torch.device) -> Uploaded:
        """Copy the inputs, the edits, ∂L/∂output, ∂L/∂tap and the directions to the device."""
        request, dtype = self.request, TORCH_DTYPES[self.bound.dtype]
        uploaded = compute.upload(self.bound, device, request.edits)
        if request.upstream is not None:
            upstream = compute.placed(request.upstream, UPSTREAM, device, dtype, self.bound.output_shape)
            uploaded.tensors[UPSTREAM] = upstream
        for tap, array in (request.tap_upstream or {}).items():
            field, shape = tap_upstream(tap), subject_shape(tap, self.bound)
            blank = device.type == "meta"
            upstream = compute.placed(array, field, device, dtype, shape if blank else array.shape)
            uploaded.tensors[field] = self._batched(upstream, tap)
        for name, direction in (request.directions or {}).items():
            field = f"directions.{name}"
            if device.type == "meta":
                of = uploaded.tensors[name].shape if name in uploaded.tensors else subject_shape(name, self.bound)
                uploaded.tensors[field] = torch.empty(of, dtype=dtype, device=device)
            else:
                uploaded.tensors[field] = compute.converted(direction, field, device, dtype)
        return uploaded

    def launch(self, uploaded: Uploaded) -> Results:
        """Compute the gradients, then the taps, then the check by central differences."""
        bound, request, edits, tensors = self.bound, self.request, uploaded.edits, uploaded.tensors
        upstreams = {name: tensors.pop(name) for name in (UPSTREAM, *map(tap_upstream, self._given)) if name in tensors}
        directions = {name: tensors.pop(f"directions.{name}") for name in request.directions or {}}
        phase("attention", "graph", "pairs")
        graph = graph_of(bound, self.targets, uploaded, self.kernel, self._given)
        inner = [tap for tap in request.return_ if tap != "output"]
        again = bool(inner) or request.dropout is not None
        if not again:
            tensors.clear()
        phase("backward of attention", "upstream")
        if UPSTREAM not in upstreams:
            upstreams[UPSTREAM] = torch.ones_like(graph.output, requires_grad=False)
        for name in self.targets.upstreams:
            upstreams[name] = upstreams[name].expand_as(graph.of(name)).detach().requires_grad_()
        phase(None, "gradients", "of_pairs")
        counted = graph.counted(upstreams)
        gradients = differentiate(graph, self.targets, counted, again=request.directions is not None)
        results: Results = {"gradients": {name: self._in_reply(name, x) for name, x in gradients.items()}}
        if request.directions is not None:
            phase("second gradients", "gradients", "of_pairs")
            products = hessian_products(graph, gradients, upstreams, directions)
            results["hessian_products"] = {name: self._in_reply(name, x) for name, x in products.items()}
            del products
        if "output" in request.return_:
            results["output"] = compute.in_reply(graph.output, bound, "output")
        if again:
            phase("taps again", "taps")
            with torch.no_grad():
                problem = compute.problem(bound, tensors, uploaded.parameters)
                taps = attend(problem, inner, self.selection, edits, self.kernel).taps if inner else {}
            results |= compute.tap_results(bound, taps, average_heads=request.average_heads)
            results |= dropout_results(bound, request, problem, self.selection)
        if request.check:
            phase("check", "graph", "pairs")
            results["check"] = check(bound, request, self.targets, graph.output.device, self.checked_elements)
        return results

    @property
    def _given(self) -> tuple[str, ...]:
        """The taps that L depends on beside the output."""
        return tuple(self.request.tap_upstream or ())

    def _batched(self, upstream: Tensor, tap: str) -> Tensor:
        """∂L/∂tap with the dimensions that the query's layout omits."""
        layout = self.bound.layout
        upstream = upstream.expand(subject_shape(tap, self.bound))
        if not layout.batched:
            upstream = upstream[None]
        return upstream if layout.headed else upstream[:, None]

    def _in_reply(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient in the shape of its subject: a tensor as it was sent, a tap as it would be returned."""
        if name in TAPS or name in self.targets.upstreams:
            return compute.in_reply(gradient, self.bound, tap_of(name) or ("output" if name == UPSTREAM else name))
        if name in INPUTS:
            return as_sent(gradient, self.bound, getattr(self.request, name).ndim)
        return gradient.detach()  # a parameter's gradient has the computing dtype


def as_sent(gradient: Tensor, bound: BoundRequest, rank: int) -> Tensor:
    """The gradient of an input in the reply's dtype, with as many dimensions as were sent: those it lacked are 1."""
    shape = gradient.shape[gradient.ndim - rank :]
    return gradient.detach().to(TORCH_DTYPES[bound.reply_dtype]).reshape(shape)

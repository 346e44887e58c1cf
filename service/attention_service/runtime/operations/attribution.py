"""Attributions of one request: to each weight and head, before and after the edits if both are compared."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.attribution import AttributionRequest, Readout
from attention_service import cost
from attention_service.core.edits import BoundEdit, apply
from attention_service.core.inspection.attribution import (
    GRADIENTS,
    Attribution,
    head_importance,
    lengths_of,
    weights_and_context,
)
from attention_service.core.inspection.loss_path import inner_product, log_likelihood, path_of, points_at_once
from attention_service.core.kernels import MATERIALIZED, Kernel, Needs
from attention_service.core.methods import approximation_of
from attention_service.core.multihead import Parameters
from attention_service.core.problem import Problem, Selection
from attention_service.core.slices import phase
from attention_service.core.stages import values_read
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound_request import BoundRequest, wrong_shape
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.binding.selection import bind_selection, check_edits, check_labels
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import compute
from attention_service.runtime.operations.differentiation import UPSTREAM
from attention_service.runtime.operations.gradients import check_upstream
from attention_service.runtime.planning.planner import (
    PlanKey,
    Rehearsed,
    edit_sizes,
    names_tokens,
    plan_request,
    selection_sizes,
)
from attention_service.runtime.scheduling.jobs import Job, Prepared
from attention_service.runtime.scheduling.operation import DeviceOperation, Results, Uploaded

READOUT = "readout."
"""Prefix of the readout's tensors among the fields of a request."""


def prepare(module: Module | None, request: AttributionRequest, device: Device, capacity: int) -> Job:
    """Bind and plan one attribution. Raises an InvalidRequest that names the field at fault."""
    bound = bind(module, request)
    if approximation_of(bound.spec) is not None:
        raise InvalidRequest.at(
            "spec.method",
            f"attribution differentiates attention with a kernel, and {bound.spec.method.name} has none; take method "
            "exact, or gradients with wrt weights",
        )
    selection = bind_selection(request.select, bound)
    check_edits(request.edits, bound)
    check_labels(request, bound)
    check_upstream(request.upstream, bound)
    classes = 0
    if request.readout is not None:
        classes = _check_readout(request.readout, bound)
    methods = tuple(sorted(set(request.methods)))
    points, readout = _points(request), request.readout
    question = PlanKey(
        "attribution",
        kernel=request.kernel,
        needs=Needs(edits=bool(request.edits), taps_gradient=True),
        asks=(
            methods, request.compare, points, classes, readout is not None and readout.bias is not None,
            request.upstream is not None, selection_sizes(selection), edit_sizes(request.edits),
        ),
        has_sizes=points > 1 or names_tokens(request.edits, selection),
    )  # fmt: skip
    few = min(points, 1 + _at_once(bound, request))  # each further batch holds as much as the first
    rehearsal = request.model_copy(update={"steps": few})

    def operate(bound: BoundRequest, kernel: str | Kernel) -> Attributing:
        return Attributing(bound, rehearsal, selection)

    counted = Rehearsed(
        operate,
        partial(_flops, methods=methods, compared=request.compare is not None, points=points, classes=classes,
                selection=selection),
        dict.fromkeys(("gradients", "unedited gradients"), points / few),
    )  # fmt: skip
    plan = plan_request(bound, question, device, capacity, counted)

    def operation(bound: BoundRequest) -> Attributing:
        return Attributing(bound, request, selection)

    return Job(Prepared("attribution", plan, bound.dtype, device.torch, operation, watched=False), bound, module)


def _flops(
    bound: BoundRequest, kernel: str, *,
    methods: Collection[str], compared: bool, points: int, classes: int, selection: Selection,
) -> int:  # fmt: skip
    """FLOPs of the matrix products: the context, the way back to it, the weights again, and each method over pairs."""
    heads = bound.heads if selection.heads is None else len(selection.heads)
    queries = bound.queries if selection.queries is None else len(selection.queries)
    pairs = bound.batch * heads * queries * bound.keys
    merged = bound.heads * bound.value_dim
    width = merged if bound.d_model is None else bound.d_model
    out = 0 if bound.d_model is None else 2 * bound.batch * bound.queries * merged * width
    once = cost.executed_flops(bound, MATERIALIZED)
    once += points * (2 * out + 3 * 2 * bound.batch * bound.queries * width * classes)
    once += 2 * pairs * bound.key_dim
    of_gradients = ("integrated" in methods) + (not {"gradient_attention", "relevance"}.isdisjoint(methods))
    once += 2 * pairs * bound.value_dim * of_gradients
    if "norm" in methods:
        once += 2 * pairs * heads
        if bound.d_model is not None:
            once += 2 * heads**2 * bound.value_dim**2 * (bound.batch * bound.keys + width)
    return once * (1 + compared)


def _points(request: AttributionRequest) -> int:
    """The points of the path: one if L is linear in the weights, or nothing is integrated."""
    return request.steps if request.readout is not None and "integrated" in request.methods else 1


def _at_once(bound: BoundRequest, request: AttributionRequest) -> int:
    """The points of the path that are one batch: one if an edit has numbers of its own for each sequence."""
    if request.readout is None or (bound.batch > 1 and any(edit.tensor is not None for edit in request.edits)):
        return 1
    merged = bound.heads * bound.value_dim
    width = max(merged, bound.d_model or 0, len(request.readout.weight))
    return points_at_once(_points(request), bound.batch * bound.queries * width)


def _check_readout(readout: Readout, bound: BoundRequest) -> int:
    """Return the number of classes. Raises ShapeMismatch, and InvalidRequest for a target that is no class."""
    width = bound.output_shape[-1] * (bound.heads if compute.has_heads("output", bound) else 1)
    classes = readout.weight.shape[0] if readout.weight.ndim else 0
    of_queries = (bound.batch, bound.queries) if bound.layout.batched else (bound.queries,)
    for name, array, expected in (
        ("weight", readout.weight, (max(classes, 1), width)),
        ("bias", readout.bias, (classes,)),
        ("targets", readout.targets, of_queries),
    ):
        if array is not None and tuple(array.shape) != expected:
            raise wrong_shape(f"{READOUT}{name}", f"shape {list(expected)}", array, list(expected))
    targets = readout.targets
    if targets.size and not -1 <= int(targets.min()) <= int(targets.max()) < classes:
        wrong = int(targets.max()) if int(targets.max()) >= classes else int(targets.min())
        raise InvalidRequest.at(
            "readout.targets",
            f"{wrong} is not a class; there are {classes}, numbered from 0, and −1 leaves a query out",
            limit=classes,
        )
    return int(classes)


@dataclass(eq=False, slots=True)
class Attributing(DeviceOperation):
    """Attributions to the weights and heads of one request."""

    bound: BoundRequest
    request: AttributionRequest
    selection: Selection

    def upload(self, device: torch.device) -> Uploaded:
        """Copy the inputs, the edits, and ∂L/∂output or the readout to the device."""
        request, dtype = self.request, TORCH_DTYPES[self.bound.dtype]
        uploaded = compute.upload(self.bound, device, request.edits)
        if request.upstream is not None:
            upstream = compute.placed(request.upstream, UPSTREAM, device, dtype, self.bound.output_shape)
            uploaded.tensors[UPSTREAM] = upstream
        if (readout := request.readout) is not None:
            for name, array in (("weight", readout.weight), ("bias", readout.bias)):
                if array is not None:
                    uploaded.tensors[READOUT + name] = compute.converted(array, READOUT + name, device, dtype)
            shape = self.bound.batch, self.bound.queries
            targets = compute.placed(readout.targets, f"{READOUT}targets", device, torch.int64, shape)
            uploaded.tensors[f"{READOUT}targets"] = targets
        return uploaded

    def launch(self, uploaded: Uploaded) -> Results:
        """Attribute to the weights after the edits, then to those without them."""
        bound, tensors = self.bound, uploaded.tensors
        given = {name: tensors.pop(name) for name in [*tensors] if name == UPSTREAM or name.startswith(READOUT)}
        phase("project", "roles")
        problem = compute.problem(bound, tensors, uploaded.parameters)
        tensors.clear()
        attributions = self._attributions(problem, uploaded.parameters, uploaded.edits, given)
        completeness = attributions.pop("completeness", None)
        results: Results = {name: self._in_reply(name, x) for name, x in attributions.items()}
        if completeness is not None:
            results["completeness"] = {name: self._in_reply(name, x) for name, x in completeness.items()}
        if self.request.compare is not None:
            without = self._attributions(problem, uploaded.parameters, (), given, "unedited ")
            phase("differences", "differences", "differences")
            results["differences"] = {
                name: self._in_reply(name, torch.sub(x, without[name], out=without[name]))
                for name, x in attributions.items()
            }
        return results

    def _attributions(
        self,
        problem: Problem,
        parameters: Parameters,
        edits: Sequence[BoundEdit],
        given: dict[str, Tensor],
        phases: str = "",
    ) -> Results:
        """Attributions by name, and ``completeness`` with ``integrated``; all batched.

        phases: prefix of the names of the phases.
        """
        request, heads = self.request, self.selection.heads
        methods, path = frozenset(request.methods), None
        results: Results = {}
        wanted = request.readout is not None or not methods.isdisjoint({"integrated", "head_importance"})
        phase(f"{phases}context", "context")
        weights, context = weights_and_context(problem, edits, wanted=wanted)
        edited = partial(apply, edits, "context")
        if not methods.isdisjoint(GRADIENTS):
            phase(f"{phases}gradients", "gradients")
            loss = partial(self._loss, parameters=parameters, edits=edits, given=given)
            path = path_of(context, edited, loss, _points(request), _at_once(self.bound, request))
            if "head_importance" in methods:
                results["head_importance"] = head_importance(edited(context), path.after_edits)
            if "integrated" in methods:
                results["completeness"] = path.completeness(context)
        del context
        phase(f"{phases}values", "values")
        values = values_read(problem, edits, heads)
        projection = None if self.bound.module is None else parameters["o_proj.weight"]
        lengths = lengths_of(values, projection, heads, self.bound.heads) if "norm" in methods else None
        phase(f"{phases}attributions", "attributions", "attributions")
        results |= Attribution(problem, methods, weights, values, path, lengths).of(self.selection)
        return results

    def _loss(
        self, context: Tensor, *, parameters: Parameters, edits: Sequence[BoundEdit], given: dict[str, Tensor]
    ) -> Tensor:
        """L of each sequence, from the context after its edits."""
        output = compute.output(self.bound, parameters, context, edits)
        if self.request.readout is None:
            return inner_product(output, given.get(UPSTREAM))
        weight, targets = given[f"{READOUT}weight"], given[f"{READOUT}targets"]
        return log_likelihood(output, weight, given.get(f"{READOUT}bias"), targets)

    def _in_reply(self, name: str, x: Tensor) -> Tensor:
        """A result in the query's layout; numbers of heads in at least float32."""
        bound = self.bound
        if name in {"relevance", "norm_of_sum"}:
            return compute.in_reply(x, bound)
        if name in {"gradient_attention", "integrated", "norm"}:
            return compute.in_reply(x, bound, "weights")
        wide = "float64" if bound.dtype == "float64" else "float32"
        return compute.in_reply(x, bound, "weights" if name == "head_importance" else None, wide)

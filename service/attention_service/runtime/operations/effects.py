"""Effects: the change of the output by each edit of a sweep."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.effects import MAX_EFFECTS, EffectsRequest, SweptEdit
from attention_contract.schemas.attention import Edit
from attention_service import cost
from attention_service.core import multihead
from attention_service.core.edits import AXES, BoundEdit
from attention_service.core.inspection.effects import context_after, context_changes, each_of, reach
from attention_service.core.kernels import Kernel, Needs
from attention_service.core.methods import approximation_of
from attention_service.core.multihead import Parameters
from attention_service.core.problem import Problem
from attention_service.core.slices import phase
from attention_service.core.tensors import TORCH_DTYPES, constant, pick
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound_request import BoundRequest, strip, wrong_shape
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.binding.selection import (
    broadcasts,
    check_edit,
    check_edits,
    check_indices,
    computes_pairs,
)
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import compute
from attention_service.runtime.planning.planner import PlanKey, Rehearsed, edit_sizes, names_tokens, plan_request
from attention_service.runtime.scheduling.jobs import Job, Prepared
from attention_service.runtime.scheduling.operation import DeviceOperation, Fields, Results, Uploaded, on_host

_DIRECTION = "direction"


def prepare(module: Module | None, request: EffectsRequest, device: Device, capacity: int) -> Job:
    """Bind and plan a sweep of edits. Raises an InvalidRequest that names the field at fault."""
    bound = bind(module, request)
    check_edits(request.edits, bound)
    for index, edit in enumerate(request.edits):
        if edit.tap == "output":
            raise InvalidRequest.at(f"edits.{index}.tap", "effects are measured at the output; edit a tap before it")
    check_edit(request.sweep, bound, "sweep")
    check_indices("queries", request.queries, bound.queries, "queries")
    if request.queries is not None and len(set(request.queries)) < len(request.queries):
        raise InvalidRequest.at("queries", "a query is listed twice; list each once")
    swept = _swept(request.sweep, bound)
    if (count := prod(map(len, swept.values()))) > MAX_EFFECTS:
        raise InvalidRequest.at(
            "sweep",
            f"it has {count} edits; at most {MAX_EFFECTS} are tried in one request. List fewer heads, queries or keys",
            limit=MAX_EFFECTS,
            actual=count,
        )
    _check_direction(request, bound)
    edits = [*request.edits, request.sweep]
    question = PlanKey(
        "effects",
        kernel=request.kernel,
        needs=Needs(edits=True),
        asks=(
            edit_sizes(edits), tuple(request.sweep.over), request.direction is None or request.direction.shape,
            request.return_differences,
        ),
        has_sizes=names_tokens(edits) or request.queries is not None or request.direction is not None,
        pairs=computes_pairs(bound.spec, (), edits),
    )  # fmt: skip

    def operate(bound: BoundRequest, kernel: str | Kernel = "") -> Sweeping:
        return Sweeping(bound, request, _swept(request.sweep, bound))

    plan = plan_request(bound, question, device, capacity, Rehearsed(operate, partial(_flops, request=request)))
    return Job(Prepared("effects", plan, bound.dtype, device.torch, operate), bound, module)


def _flops(bound: BoundRequest, kernel: str, *, request: EffectsRequest) -> int:
    """FLOPs of a pass, and for each edit of those of its stages for the heads and queries that it reaches."""
    sweep, swept = request.sweep, _swept(request.sweep, bound)
    share, rows = 1.0, len(request.queries or range(bound.queries))
    if "heads" in AXES[sweep.tap] and ("heads" in swept or sweep.heads is not None):
        of = bound.kv_heads if sweep.tap in {"k", "v"} else bound.heads
        share = (1 if "heads" in swept else len(sweep.heads or ())) / of
    if "queries" in AXES[sweep.tap] and approximation_of(bound.spec) is None:
        rows = min(rows, 1 if "queries" in swept else len(sweep.queries or range(bound.queries)))
    share *= rows / max(bound.queries, 1)
    stages = cost.flops(bound, masked=False)
    again = stages.scores + stages.normalizer + stages.values + stages.output_projection
    return stages.total + round(prod(map(len, swept.values())) * share * again)


def _swept(sweep: SweptEdit, bound: BoundRequest) -> dict[str, list[int]]:
    """The indices along each swept axis. Raises InvalidRequest for an axis that the tap lacks."""
    heads = bound.kv_heads if sweep.tap in {"k", "v"} else bound.heads
    sizes = {"heads": heads, "queries": bound.queries, "keys": bound.keys}
    indices_by_axis: dict[str, list[int]] = {}
    for index, axis in enumerate(sweep.over):
        if axis not in AXES[sweep.tap]:
            raise InvalidRequest.at(
                f"sweep.over.{index}", f"{sweep.tap} has no {axis}; it has {', '.join(AXES[sweep.tap])}"
            )
        listed = getattr(sweep, axis)
        indices_by_axis[axis] = list(range(sizes[axis])) if listed is None else list(listed)
    return indices_by_axis


def _check_direction(request: EffectsRequest, bound: BoundRequest) -> None:
    if request.direction is None:
        return
    shape = _compared_shape(bound, request)
    if not broadcasts(request.direction.shape, shape):
        expected = list(strip(torch.empty(shape, device="meta"), bound.layout, heads_axis=_by_head(bound)).shape)
        words = f"a shape that broadcasts to that of the compared outputs, {expected}"
        raise wrong_shape("direction", words, request.direction, expected)


def _by_head(bound: BoundRequest) -> bool:
    """True for outputs with a dimension of heads."""
    return compute.has_heads("output", bound)


def _compared_shape(bound: BoundRequest, request: EffectsRequest) -> tuple[int, ...]:
    """The batched shape of the outputs that are compared."""
    *before, _, width = bound.output_shape
    return (*before, bound.queries if request.queries is None else len(request.queries), width)


@dataclass(eq=False, slots=True)
class Sweeping(DeviceOperation):
    """One request's sweep of edits."""

    bound: BoundRequest
    request: EffectsRequest
    swept: dict[str, list[int]]

    def upload(self, device: torch.device) -> Uploaded:
        """Copy the inputs, the tensors of the edits and the direction to the device; the swept edit comes last."""
        bound, request = self.bound, self.request
        edits: list[Edit] = [*request.edits, request.sweep]
        uploaded = compute.upload(bound, device, edits)
        if request.direction is not None:
            direction = compute.converted(request.direction, _DIRECTION, device, TORCH_DTYPES[bound.dtype])
            uploaded.tensors[_DIRECTION] = direction
        return uploaded

    def launch(self, uploaded: Uploaded) -> Results:
        """Compute the output without the swept edit, then the change by each edit."""
        bound, parameters, tensors = self.bound, uploaded.parameters, uploaded.tensors
        *edits, sweep = uploaded.edits
        direction = tensors.pop(_DIRECTION, None)
        phase("project", "roles")
        problem = compute.problem(bound, tensors, parameters)
        tensors.clear()
        phase("attention", "context")
        context = context_after(problem, edits)
        output = self._compared(compute.output(bound, parameters, context))
        phase("edits", "context")
        count = prod(map(len, self.swept.values()))
        measures = _Measures(output.double(), direction, count)
        changes = output.new_empty(len(output), count, *output.shape[1:]) if self.request.return_differences else None
        for number, edit in each_of(problem, sweep, self.swept):
            change = self._change(problem, context, parameters, edits, edit, torch.zeros_like(output))
            measures.put(number, change)
            if changes is not None:
                changes[:, number] = change
        results: Results = {"effects": {name: self._shaped(x) for name, x in measures.all().items()}}
        if changes is not None:
            results["differences"] = self._shaped(changes, _by_head(bound))
        return results

    def collect(self, results: Results) -> Fields:
        """Copy the results to the host."""
        return on_host(results) | {"swept": self.swept}

    def _compared(self, output: Tensor) -> Tensor:
        """The outputs of the compared queries."""
        return output if self.request.queries is None else pick(output, output.ndim - 2, self.request.queries)

    def _change(
        self, problem: Problem, context: Tensor, parameters: Parameters, edits: Sequence[BoundEdit],
        edit: BoundEdit, change: Tensor,
    ) -> Tensor:  # fmt: skip
        """Add the change of the compared outputs by one edit to ``change``, which is zero."""
        bound, measured = self.bound, self.request.queries
        reached = reach(edit, problem, measured)
        if reached is None:
            return change
        place = None if measured is None else {query: at for at, query in enumerate(measured)}
        for tile, delta in context_changes(problem, context, edits, edit, reached):
            queries = tile.queries if tile.queries is not None else range(bound.queries)
            places = [place[query] for query in queries] if place else [*queries]
            rows = constant(places, change.device, torch.int64)  # of none it would be floats
            if bound.module is not None:
                change.index_add_(1, rows, multihead.project_heads(parameters, delta, tile.heads, bound.heads))
                continue
            # Each head of a merged output has columns of its own.
            by_head = multihead.split_heads(change, bound.heads) if bound.layout.merged else change
            for at, head in enumerate(tile.heads or range(bound.heads)):
                by_head[:, head].index_add_(1, rows, delta[:, at])
        return change

    def _shaped(self, x: Tensor, by_head: bool = False) -> Tensor:
        """``[B, N, …]`` with the swept axes apart, in the reply's layout and in at least float32."""
        x = x.reshape(len(x), *(len(indices) for indices in self.swept.values()), *x.shape[2:])
        if not self.bound.layout.headed and by_head:
            x = x.squeeze(1 + len(self.swept))
        dtype = torch.float64 if self.bound.dtype == "float64" else torch.float32
        return (x if self.bound.layout.batched else x[0]).to(dtype)


class _Measures:
    """The measures ``[B, N]`` of N changes, in float64."""

    def __init__(self, output: Tensor, direction: Tensor | None, count: int) -> None:
        self._axes = tuple(range(1, output.ndim))
        self._of_output = output.square().sum(self._axes).sqrt()
        self._direction = None if direction is None else direction.double()
        names = ("norm", "max") if direction is None else ("norm", "max", "projection")
        self._sizes = {name: output.new_zeros(len(output), count) for name in names}

    def put(self, number: int, change: Tensor) -> None:
        """Measure one change, of the outputs' shape."""
        change = change.double()
        self._sizes["norm"][:, number] = change.square().sum(self._axes).sqrt()
        if change.numel():
            self._sizes["max"][:, number] = change.abs().amax(self._axes)
        if self._direction is not None:
            self._sizes["projection"][:, number] = (change * self._direction).sum(self._axes)

    def all(self) -> dict[str, Tensor]:
        """All measures."""
        return self._sizes | {"relative": self._sizes["norm"] / self._of_output[:, None]}

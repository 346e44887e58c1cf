"""Inspection: what each head looks at. Statistics over the real queries, top keys, the weights themselves."""

from dataclasses import replace

import torch
from torch import Tensor

from attention_contract.errors import ShapeMismatch
from attention_contract.schemas.weights import WeightsRequest
from attention_service.core import cost
from attention_service.core.arrays import to_torch
from attention_service.core.blocks import blocks, rows_at_once
from attention_service.core.cost import Clock, Workload
from attention_service.core.labour import labour
from attention_service.core.stages import stages
from attention_service.core.types import Problem, Selection
from attention_service.modules.resident import Module
from attention_service.runtime import compute
from attention_service.runtime.binding import bind
from attention_service.runtime.bound import Bound
from attention_service.runtime.device import Device
from attention_service.runtime.forward import tap_fields
from attention_service.runtime.jobs import Fields, Job
from attention_service.runtime.joining import Kind, Part, in_common, joinable, size_of
from attention_service.runtime.planning import QUICK, Plan, Purpose, choose_kernel, workload
from attention_service.runtime.selecting import bind_selection, check_tap

_BYTES_PER_WEIGHT = 88
"""While statistics are gathered: five stages in float32 at most twice; the shares and five statistics in float64."""
_BYTES_PER_POSITION = 9
"""A query's position and whether it is real, for each sequence; and the list of all queries, cut into blocks."""


def prepare(module: Module | None, request: WeightsRequest, device: Device, room: int) -> Job:
    """Bind and plan one inspection. Raises an InvalidRequest that names the field at fault.

    ``room``: the bytes that it may need at most, which bear on the kernel.
    """
    bound = bind(module, request)
    check_tap("weights", bound.spec, "spec.method")
    selection = bind_selection(request.select, bound)
    query_mask = request.query_mask
    if query_mask is not None:
        expected = (bound.batch, bound.queries) if bound.layout.batched else (bound.queries,)
        if query_mask.shape != expected:
            raise ShapeMismatch(
                f"query_mask: expected shape {list(expected)}, got {list(query_mask.shape)}",
                param="query_mask",
                expected=list(expected),
                actual=list(query_mask.shape),
            )
    work = workload(bound, device, ("weights",) if request.return_weights else (), selection)
    kind, plan = device.plans.get(
        device.clock,
        ("weights", work.key, bound.dtype, request.kernel, room, request.top_k),
        lambda: _planned(work, bound.dtype, request, device, room),
    )

    def passed(bound: Bound) -> Fields:
        return _run(bound, request, selection, device.torch)

    part = None
    if query_mask is None and joinable(bound):
        asked = selection, request.top_k, request.return_weights, request.average_heads
        part = Part(kind, (module, kind, in_common(bound), asked), bound, size_of([bound]), plan.peak_bytes, passed)
    return Job("weights", plan, bound.dtype, module, lambda: passed(bound), part=part)


def _planned(work: Workload, dtype: str, request: WeightsRequest, device: Device, room: int) -> tuple[Kind, Plan]:
    choose_kernel(work, dtype, device, request.kernel, room, Purpose(keeps_weights=True))
    clock, named = device.clock, request.top_k
    alike = replace(work, batch=1, queries=1, keys=1)

    def make() -> Kind:
        return Kind(work, lambda sized: clock.inspection(sized, named=named), lambda sized: _plan(sized, named, clock))

    return device.plans.get(clock, ("weights kind", alike.key, dtype, named), make), _plan(work, named, clock)


def _plan(work: Workload, named: int, clock: Clock) -> Plan:
    rows = min(work.queries, rows_at_once(work.batch, work.heads, work.keys))
    gathering = rows * work.batch * work.heads * work.keys * _BYTES_PER_WEIGHT
    gathering += work.queries * (work.batch + 4) * _BYTES_PER_POSITION
    top = _top_elements(work, named) * (17 + 2 * work.itemsize)
    return Plan(
        kernel="materialized",
        # Rows of weights are computed as beside a fused kernel, block by block; the context is not, but is counted.
        flops=cost.executed_flops(work, "materialized"),
        peak_bytes=cost.peak_bytes(work, "fused") + gathering + top,
        predicted=clock.inspection(work, named=named),
        laborious=labour(work.spec.masks) > QUICK,
    )


def _top_elements(work: Workload, named: int) -> int:
    """How many keys are named. Of each, its index and weight are held twice, where blocks are put together."""
    heads = work.heads if work.selected_heads is None else work.selected_heads
    queries = work.queries if work.selected_queries is None else work.selected_queries
    return work.batch * heads * queries * min(named, work.keys)


@torch.inference_mode()
def _run(bound: Bound, request: WeightsRequest, selection: Selection, device: torch.device) -> Fields:
    problem = compute.problem(bound, compute.load(bound, device), compute.load_parameters(bound, device))
    real = _real_queries(bound, request, problem)
    totals = _Totals(bound.batch, bound.heads, device)
    positions = torch.arange(bound.queries, device=device) + _offset(bound, problem)[:, None]  # [B, Q]
    for block in blocks(problem, Selection()):
        rows = slice(None) if block.queries is None else list(block.queries)
        totals.add(_rows(problem, block).double(), real[:, rows], positions[:, rows])
    dtype = "float64" if bound.dtype == "float64" else "float32"
    fields: Fields = {
        "statistics": {name: compute.answer(mean, bound, "weights", dtype) for name, mean in totals.means().items()},
        "queries": compute.answer(totals.queries, bound),
    }
    if request.top_k:
        keys, weights = _top(problem, selection, min(request.top_k, bound.keys))
        fields["top"] = {
            "keys": compute.answer(keys, bound, "weights"),
            "weights": compute.answer(weights, bound, "weights"),
        }
    if request.return_weights:
        weights = _rows(problem, selection)
        fields |= tap_fields(bound, {"weights": weights}, average_heads=request.average_heads)
    return fields


def _rows(problem: Problem, selection: Selection) -> Tensor:
    """The weights of the selected heads and queries."""
    return dict(stages(problem, ("weights",), selection=selection))["weights"]


def _top(problem: Problem, selection: Selection, count: int) -> tuple[Tensor, Tensor]:
    """The most attended keys of each selected query and their weights, ``[B, H, Q, count]``; −1 for no key."""
    tops = [_rows(problem, block).topk(count, dim=-1) for block in blocks(problem, selection)]
    weights = torch.cat([top.values for top in tops], dim=2)
    keys = torch.cat([top.indices for top in tops], dim=2)
    return keys.masked_fill(weights == 0, -1), weights


def _offset(bound: Bound, problem: Problem) -> Tensor:
    """``[B]``: what is added to a query's index to give its position."""
    device = problem.q.device
    if problem.offsets is None:
        return torch.full((bound.batch,), bound.past, device=device)
    return problem.offsets.to(device).expand(bound.batch)


def _real_queries(bound: Bound, request: WeightsRequest, problem: Problem) -> Tensor:
    """Bool ``[B, Q]``: given, or in self-attention the queries whose own key is real, or all."""
    device = problem.q.device
    if request.query_mask is not None:
        return to_torch(request.query_mask).to(device).reshape(bound.batch, bound.queries)
    real = torch.ones(bound.batch, bound.past + bound.new_keys, dtype=torch.bool, device=device)
    if bound.queries != bound.new_keys:
        return real.new_ones(bound.batch, bound.queries)
    if problem.key_mask is not None:
        real = real & problem.key_mask
    if problem.key_lengths is not None:
        real = real & (torch.arange(real.shape[1], device=device) < problem.key_lengths[:, None])
    return real[:, bound.past :]


class _Totals:
    """Sums over the real queries seen so far, ``[B, H]`` in float64."""

    def __init__(self, batch: int, heads: int, device: torch.device) -> None:
        self.queries = torch.zeros(batch, dtype=torch.int64, device=device)
        self._looking = torch.zeros(batch, heads, dtype=torch.float64, device=device)
        self._sums: dict[str, Tensor] = {}

    def add(self, weights: Tensor, real: Tensor, positions: Tensor) -> None:
        """Count weights ``[B, H, R, K]`` of the queries at positions ``[B, R]``, those that are real ``[B, R]``."""
        keys = torch.arange(weights.shape[-1], device=weights.device)
        shares = weights / weights.sum(-1, keepdim=True)  # NaN for a query without weights, which is not counted
        distance = (positions[:, None, :, None] - keys).abs()  # [B, 1, R, K]
        own = distance == 0
        looking = real[:, None] & (weights > 0).any(-1)  # [B, H, R]: a query that may look nowhere has no weights
        rows = {
            "entropy": torch.special.entr(shares).sum(-1),
            "max_weight": weights.amax(-1) if keys.numel() else weights.sum(-1),
            "mean_distance": (shares * distance).sum(-1),
            "first_key": shares[..., :1].sum(-1),
            "own_position": (shares * own).sum(-1),
        }
        for name, row in rows.items():
            self._sums[name] = self._sums.get(name, 0) + torch.where(looking, row, 0).sum(-1)
        self._looking += looking.sum(-1)
        self.queries += looking.any(1).sum(-1)

    def means(self) -> dict[str, Tensor]:
        """The mean of each statistic over its real queries; NaN where there are none."""
        names = ("entropy", "max_weight", "mean_distance", "first_key", "own_position")
        none = torch.zeros_like(self._looking)
        return {name: self._sums.get(name, none) / self._looking for name in names}

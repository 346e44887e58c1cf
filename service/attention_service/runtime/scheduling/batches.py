"""Batches: short requests of one kind that run in one pass, each of which gets the numbers that it would get alone.

Requests of equal lengths are stacked along the batch. Different lengths of one module share the projections, one
product for all tokens, and each length attends for itself; nothing is padded. A batch grows until its predicted
times sum to ``BATCH_S``: a pass of a small request is mostly overhead, which the batch pays once, and a large request
would gain little and keep the others waiting.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from attention_contract.spec import Mask
from attention_service.core.kernels.fused.cpu_blocks import CUT
from attention_service.core.masks.operation_count import CHEAP, mask_cost
from attention_service.core.methods import approximation_of
from attention_service.cost import Estimate
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.scheduling.jobs import Job, JobJoiner
from attention_service.runtime.scheduling.operation import Fields, execute

BATCH_S = 5e-3
"""Seconds that the requests of one batch would take one after the other, by the upper bounds of their predictions."""
MIXED_BATCH_S = 25e-3
"""The same for different lengths of a large module, whose weights the batch reads once."""
_STACKED = frozenset(
    {"query", "key", "value", "past_key", "past_value", "key_mask", "key_lengths", "offsets", "positions"}
    | {"gate", "beta", "initial_state", "initial_normalizer"}
)
"""Tensors with one entry for each sequence. A mask may be one for all of them."""
_CELLS = 2**12
"""Tiles that masks classify in one operation in about the time of a single tile."""


def joinable(bound: BoundRequest) -> bool:
    """True if every tensor has one entry for each sequence, and the request is quickly planned."""
    return (
        bound.arrays.keys() <= _STACKED
        and bound.dropout is None
        and not bound.learned
        and approximation_of(bound.spec) is None
        and is_quick(bound.spec.masks, bound.queries, bound.keys)
    )


def is_quick(masks: Sequence[Mask], queries: int, keys: int, offsets: int = 1) -> bool:
    """True if masks take little planning. ``offsets``: number of different offsets of the sequences."""
    if not masks:
        return True
    tiles = -(-queries // CUT.rows) * -(-keys // CUT.cell)
    return mask_cost(masks) * offsets * (1 + tiles / _CELLS) <= CHEAP


def in_common(bound: BoundRequest) -> tuple[object, ...]:
    """The properties that tensors must share to be stacked, beside their sizes."""
    layout = bound.layout
    dtypes = tuple((name, array.dtype.str, type(array)) for name, array in bound.arrays.items())
    return layout.headed, layout.merged, bound.reply_dtype, dtypes


@dataclass(frozen=True)
class Batch:
    """Jobs that run in one pass."""

    jobs: tuple[Job, ...]
    groups: tuple[tuple[int, ...], ...]
    """The places in ``jobs`` of those that have equal lengths."""
    plan: Plan
    """The plan of the whole pass, stacked tensors included."""

    @property
    def more(self) -> int:
        """Bytes that the pass needs beyond what its jobs are admitted for."""
        return max(self.plan.peak_bytes - sum(job.prepared.plan.peak_bytes for job in self.jobs), 0)

    def run(self, device: torch.device) -> list[Fields]:
        """The reply's fields of each job: views of the results of one pass. Blocks."""
        first, bounds = self.jobs[0].prepared, [job.bound for job in self.jobs]
        mixed = _joining(self.jobs[0]).mixed
        stacks = [stacked([bounds[place] for place in group]) for group in self.groups]
        if len(stacks) == 1 or mixed is None:
            fields_of_groups = [execute(first.operation(stacks[0]), device)]
        else:
            fields = execute(mixed(stacks), device)
            fields_of_groups = [fields[str(index)] for index in range(len(stacks))]
        answers: dict[int, Fields] = {}
        for group, whole in zip(self.groups, fields_of_groups, strict=True):
            start = 0
            for place in group:
                stop = start + bounds[place].batch
                answers[place] = _rows(whole, slice(start, stop), batched=bounds[place].layout.batched)
                start = stop
        return [answers[place] for place in range(len(bounds))]


def choose(waiting: Sequence[Job], spare: int) -> Batch | None:
    """The first of the jobs with those after it that run in one pass with it; None if it runs alone.

    spare: bytes that a batch may need beyond what its jobs are admitted for.
    """
    first = _joining(waiting[0])
    longest = first.longest_s or (BATCH_S if first.mixed is None else MIXED_BATCH_S)
    seconds = 0.0
    taken: list[Job] = []
    for job in waiting:
        seconds += job.prepared.plan.predicted.high
        if taken and seconds > longest:
            break
        taken.append(job)
    while len(taken) > 1:
        batch = _batch(taken)
        if batch.more <= spare:
            return batch
        taken = taken[: len(taken) // 2]
    return None


def _batch(jobs: Sequence[Job]) -> Batch:
    groups: dict[tuple[int, int], list[int]] = {}
    for place, job in enumerate(jobs):
        groups.setdefault(_lengths(job), []).append(place)
    plans = [_plan([jobs[place] for place in group]) for group in groups.values()]
    plan = plans[0]
    if len(plans) > 1:
        predicted = sum((mate_plan.predicted for mate_plan in plans), Estimate(0.0, 0.0, 0.0))
        flops, peak = sum(mate_plan.flops for mate_plan in plans), sum(mate_plan.peak_bytes for mate_plan in plans)
        plan = replace(plan, flops=flops, peak_bytes=peak, predicted=predicted)
    copied = sum(job.bound.arrays[name].nbytes for job in jobs for name in _sent(job.bound))
    whole = Plan(plan.kernel, plan.flops, plan.peak_bytes + copied, plan.predicted, plan.off_loop)
    return Batch(tuple(jobs), tuple(map(tuple, groups.values())), whole)


def _plan(jobs: Sequence[Job]) -> Plan:
    """The plan of jobs of equal lengths at once."""
    if len(jobs) == 1:
        return jobs[0].prepared.plan
    return _joining(jobs[0]).plan(jobs[0].bound, sum(job.bound.batch for job in jobs))


def _joining(job: Job) -> JobJoiner:
    if job.prepared.joining is None:
        raise TypeError("a job that runs alone is in no batch")
    return job.prepared.joining


def _lengths(job: Job) -> tuple[int, int]:
    return job.bound.queries, job.bound.keys


def stacked(bounds: Sequence[BoundRequest]) -> BoundRequest:
    """Requests of equal lengths as one, in their order."""
    first = bounds[0]
    layout = first.layout if first.layout.batched else replace(first.layout, batched=True)
    if len(bounds) == 1:
        return first.replaced(layout=layout)
    batch = sum(bound.batch for bound in bounds)
    arrays = {name: np.concatenate([bound.arrays[name] for bound in bounds]) for name in _sent(first)}
    if first.cached is None:
        return first.replaced(layout=layout, batch=batch, arrays=arrays)
    rows = tuple(row for bound in bounds for row in bound.cached or ())
    return first.replaced(layout=layout, batch=batch, arrays=arrays, cached=rows)


def _sent(bound: BoundRequest) -> list[str]:
    """The names of the tensors that a request brought: all but the past of a session."""
    return [name for name in bound.arrays if bound.cached is None or name not in {"past_key", "past_value"}]


def _rows(fields: Fields, rows: slice, *, batched: bool) -> Fields:
    """The rows of one request, in its layout."""
    return {
        name: _rows(value, rows, batched=batched)
        if isinstance(value, dict)
        else value[rows]
        if batched
        else value[rows.start, ...]
        for name, value in fields.items()
    }

"""Steps: forward passes over new tokens whose past lies in the pages of sessions.

A step that returns its output alone attends in place, with steps of other sessions of its module in one pass. Any other
step is the ordinary forward pass over a past that is gathered from the pages.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, repeat
from operator import attrgetter, itemgetter
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from attention_contract.base import with_tensors
from attention_contract.errors import AttentionError
from attention_contract.schemas.attention import AttentionInputs, ForwardRequest
from attention_contract.spec import AttentionSpec, Causal, Exact
from attention_contract.tensors import DTYPES, Array
from attention_service.core import multihead
from attention_service.core.attention import attend
from attention_service.core.kernels import MATERIALIZED
from attention_service.core.kv_cache.attention import Runs, attend_in_place, in_place_fault
from attention_service.core.kv_cache.past import Cached, write
from attention_service.core.nonfinite_keys import sum_of
from attention_service.core.positions import POSITIONS
from attention_service.core.positions.base import Inert
from attention_service.core.problem import Problem, added_keys
from attention_service.core.tensors import TORCH_DTYPES, are_finite
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import compute, forward
from attention_service.runtime.scheduling.batches import in_common
from attention_service.runtime.scheduling.jobs import Job, JobJoiner, Prepared
from attention_service.runtime.scheduling.operation import DeviceOperation, Fields, Results, Uploaded, on_host
from attention_service.runtime.sessions.step_plans import IN_PLACE, StepPlan, bucket

RequestT = TypeVar("RequestT", bound=AttentionInputs)

_NEW_TOKEN_TENSORS = ("query", "key", "value")
"""The tensors that hold new tokens; a step may bring the query alone."""
_TOKENS_ALONE = frozenset({*_NEW_TOKEN_TENSORS, "at", "step", "version", "encoding"})
"""The fields of a step that brings nothing but tokens, and asks for their output alone."""
_ARRAYS = attrgetter("arrays")
_READ = {*_NEW_TOKEN_TENSORS, "key_mask", "past_key", "past_value", "positions"}
"""The tensors of a request that attends in place."""
_OTHERS = frozenset({
    "mask", "key_mask", "key_lengths", "global_mask", "gate", "beta", "initial_state",
    "initial_normalizer", "positions", "select",
})  # fmt: skip
"""The fields of which a step whose plan is remembered brings none."""
_PASS_S = 60e-3
"""Seconds of the steps of one pass, one after the other, by their upper bounds, at most. The pass takes a fifth: steps
are predicted to take more than twice their time, and share the projections."""
_LONG = 2**22
"""Pairs of a new token and a key from which on a step is an ordinary forward pass, which stops when it is cancelled."""


def past_arrays(module: Module, sequences: int, held: int) -> dict[str, Array]:
    """A past of this many tokens for binding and planning: it has a shape and takes no memory."""
    sizes, number = module.sizes, np.zeros((), DTYPES[module.config.dtype or "float32"])
    widths = {"past_key": sizes.head_dim, "past_value": sizes.value_dim}
    return {name: np.broadcast_to(number, (sequences, sizes.kv_heads, held, width)) for name, width in widths.items()}


def is_cuttable(module: Module, request: ForwardRequest) -> bool:
    """True if a step's tokens may come one part after the other: causal, and nothing but tokens and their output."""
    spec = module.config.spec
    causal = any(isinstance(mask, Causal) for mask in spec.masks) and isinstance(spec.method, Exact)
    return causal and request.key is None and request.value is None and _is_plain(request)


def prepare(module: Module, request: ForwardRequest, device: Device, capacity: int, rows: tuple[Cached, ...]) -> Job:
    """Bind and plan one step. Raises what a forward pass raises."""
    if not _asks_for_output(request):
        return over_past(forward.prepare, module, request, device, capacity, rows)
    job = planned(module, request, device, capacity, rows)
    if job is None and _is_plain(request):
        _plan_bucket(module, request, device, capacity, rows)
        job = planned(module, request, device, capacity, rows)
    if job is not None:
        return job
    bound = bind(module, _with_past(module, request, rows)).replaced(cached=rows)
    if not _attends_in_place(bound):
        return over_past(forward.prepare, module, request, device, capacity, rows)
    return Job(_prepared(bound, StepPlan.of(bound, device, capacity, bound), device), bound, module)


def planned(
    module: Module, request: ForwardRequest, device: Device, capacity: int, rows: tuple[Cached, ...]
) -> Job | None:
    """A step that brings nothing but tokens, by the plan of its bucket of pasts; None if that is not made yet.

    Plans are remembered, since every session passes through every length.
    """
    if not _is_plain(request):
        return None
    past = rows[0].tokens
    cached_plan: tuple[BoundRequest, StepPlan, Prepared] | None = device.plans.find(
        device.clock, _bucket_key(module, request, bucket(past)[1])
    )
    if cached_plan is None or cached_plan[1].plan.peak_bytes > capacity:
        return None
    blank, plan, prepared = cached_plan
    arrays = {}
    for name in _NEW_TOKEN_TENSORS:
        if (x := getattr(request, name)) is not None:
            arrays[name] = x if x.ndim == 3 else x[None]
    bound = blank.replaced(module=module, cached=rows, past=past, keys=past + blank.queries, arrays=arrays)
    return Job(prepared.with_plan(plan.at(past)), bound, module)


def _plan_bucket(
    module: Module, request: ForwardRequest, device: Device, capacity: int, rows: tuple[Cached, ...]
) -> None:
    """Remember the plan of a step's bucket of pasts, if its longest one can be planned in place."""
    first, last = bucket(rows[0].tokens)
    try:
        fewest, most = (
            bind(module, with_tensors(request, past_arrays(module, len(rows), held))) for held in (first, last)
        )
    except AttentionError:  # the longest pasts of the bucket are too long, or the request is at fault
        return
    if _attends_in_place(most):
        plan = StepPlan.of(most, device, capacity, fewest)
        entry = most.replaced(module=None, arrays={}), plan, _prepared(most, plan, device)
        device.plans.keep(device.clock, _bucket_key(module, request, last), entry)


def _bucket_key(module: Module, request: ForwardRequest, last: int) -> Hashable:
    """Equal for steps of nothing but tokens that one plan serves."""
    query, key, value = request.query, request.key, request.value
    return (
        "step", module.config_json, last, query.shape, query.dtype, type(query),
        None if key is None else (key.shape, key.dtype, type(key)),
        None if value is None else (value.shape, value.dtype, type(value)),
    )  # fmt: skip


def _prepared(bound: BoundRequest, plan: StepPlan, device: Device) -> Prepared:
    group = device.plans.get(device.clock, ("steps", bound.queries, in_common(bound)), object)
    joining = JobJoiner(group, plan, Steps, _PASS_S)
    return Prepared("forward", plan.plan, bound.dtype, device.torch, _alone, watched=False, joining=joining)


def over_past(
    prepare: Callable[..., Job],
    module: Module,
    request: AttentionInputs,
    device: Device,
    capacity: int,
    rows: tuple[Cached, ...],
) -> Job:
    """Bind and plan an operation by its own ``prepare``; it runs over the past of these sequences, alone."""
    job = prepare(module, _with_past(module, request, rows), device, capacity)
    job.bound = job.bound.replaced(cached=rows)
    job.prepared = replace(job.prepared, watched=False, joining=None)
    return job


def _with_past(module: Module, request: RequestT, rows: Sequence[Cached]) -> RequestT:
    """The request with a past that has a shape and takes no memory."""
    return with_tensors(request, past_arrays(module, len(rows), rows[0].tokens))


def _is_plain(request: ForwardRequest) -> bool:
    """True if a request brings nothing but tokens, and asks for their output alone."""
    stated = request.__pydantic_fields_set__
    if not _OTHERS.isdisjoint(stated) and any(getattr(request, name) is not None for name in _OTHERS & stated):
        return False
    return stated <= _TOKENS_ALONE or _asks_for_output(request)


def _asks_for_output(request: ForwardRequest) -> bool:
    """True if a request asks for its output alone, unedited, by no other kernel."""
    changed = request.edits or request.compare or request.dropout or request.report_error or request.parameters
    return (
        list(request.return_) == ["output"]
        and not (changed or request.return_state)
        and request.kernel in {None, IN_PLACE}
    )


def _attends_in_place(bound: BoundRequest) -> bool:
    """True if attention over the pages computes the context."""
    spec, dtype = bound.spec, TORCH_DTYPES[bound.dtype]
    if bound.arrays.keys() - _READ or bound.sequence_masks is not None or added_keys(spec) or not bound.queries:
        return False
    if bound.new_keys != bound.queries or _padding(bound) is None:
        return False
    if POSITIONS.of(spec.position).biased and "positions" in bound.arrays:  # in place a place is an index
        return False
    if type(POSITIONS.of(spec.position)).added is not Inert.added or bound.queries * bound.keys >= _LONG:
        return False
    return in_place_fault(spec, dtype) is None


def _padding(bound: BoundRequest) -> list[int] | None:
    """The number of first keys that each sequence hides; None if it hides others, or new ones."""
    mask = bound.arrays.get("key_mask")
    if mask is None:
        return [0] * bound.batch
    real = np.asarray(mask, bool)
    first = real.argmax(1)
    in_front = bool((first + real.sum(1) == bound.keys).all() and (first <= bound.past).all())
    return first.tolist() if in_front else None


def _alone(bound: BoundRequest) -> "Steps":
    return Steps((bound,), single=True)


@dataclass(eq=False, slots=True)
class Steps(DeviceOperation):
    """Steps of sessions of one module, each of as many new tokens: one product projects all of them."""

    bounds: Sequence[BoundRequest]
    single: bool = False
    """Give the fields of the one step rather than those of each by its number. Several have batched layouts."""

    def upload(self, device: torch.device) -> Uploaded:
        """Copy the new tokens to the device, sequence after sequence, and their places if the spec reads them."""
        first = self.bounds[0]
        arrays = {}
        for name in _NEW_TOKEN_TENSORS:
            if name in first.arrays:
                tensors = [*map(itemgetter(name), map(_ARRAYS, self.bounds))]
                arrays[name] = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
        if POSITIONS.of(first.spec.position).reads:
            arrays["positions"] = np.concatenate([_positions(bound) for bound in self.bounds])
        return compute.upload(first.replaced(arrays=arrays, cached=None), device)

    def launch(self, uploaded: Uploaded) -> Results:
        """Project all tokens, write keys and values into the pages, attend in place, project all contexts out."""
        first, parameters = self.bounds[0], uploaded.parameters
        rows: list[Cached] = []
        pasts: list[Runs] = []
        for bound in self.bounds:
            cached = bound.cached or ()
            hidden = _padding(bound) if "key_mask" in bound.arrays else None
            rows += cached
            pasts += map(Cached.runs, cached, hidden or repeat(0))
        q, k, v = self._roles(uploaded)
        write(rows, k, v)
        if first.queries > 1 and not are_finite(sum_of(k, v)):
            learned = {name: parameters[name] for name in compute.learned_names(first)}
            gathered = [_over_gathered(*sequence, first.spec, learned) for sequence in zip(q, pasts, strict=True)]
            context = torch.stack(gathered)
        else:
            context = attend_in_place(q, pasts, first.spec, parameters)
        return {"output": compute.in_reply(compute.output(first, parameters, context), first, "output")}

    def collect(self, results: Results) -> Fields:
        """Copy the outputs to the host, all in one copy, and give each step its own."""
        fields = on_host(results)
        if self.single:
            return fields
        borders = [0, *accumulate(bound.batch for bound in self.bounds)]
        return {
            str(index): {"output": fields["output"][start:stop]}
            for index, (start, stop) in enumerate(pairwise(borders))
        }

    def _roles(self, uploaded: Uploaded) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all new tokens by head, normed and rotated."""
        bound, tensors, parameters = self.bounds[0], uploaded.tensors, uploaded.parameters
        module, query, key = bound.module, tensors["query"], tensors.get("key", tensors["query"])
        value = tensors.get("value", key)
        if module is None:
            raise TypeError("a session belongs to a module")
        alone = key is query and value is query
        if alone and module.joint is not None and parameters is module.parameters and bound.head_dim == bound.value_dim:
            three = multihead.project_jointly(module.joint, module.sizes, query)
        else:
            three = multihead.project(parameters, module.sizes, query, key, value)
        if bound.spec.qk_norm is None and "positions" not in tensors:
            return three
        sequences, tokens, _ = query.shape
        sizes = {"batch": sequences, "queries": tokens, "keys": tokens, "past": 0, "arrays": {}, "cached": None}
        problem = compute.problem(bound.replaced(**sizes), tensors, parameters, three=three)
        return problem.q, problem.k, problem.v


def _over_gathered(q: Tensor, runs: Runs, spec: AttentionSpec, learned: Mapping[str, Tensor]) -> Tensor:
    """The context ``[H, Q, Dv]`` over copied keys: one that is not finite harms those queries alone that see it."""
    keys, values = (torch.cat([getattr(run, name) for run in runs], 1)[None] for name in ("keys", "values"))
    past = keys.shape[2] - q.shape[1]
    problem = Problem(q[None], keys, values, spec, past=past, learned=learned)
    return attend(problem, (), kernel=MATERIALIZED).context[0]


def _positions(bound: BoundRequest) -> Array:
    """The places of a request's new tokens: ``[B, Q]``."""
    given = bound.arrays.get("positions")
    if given is not None:
        return given
    return np.broadcast_to(np.arange(bound.past, bound.past + bound.queries), (bound.batch, bound.queries))

"""Plans of steps in place, which copy no past: their time is that of projections and of attention over the cache."""

from dataclasses import dataclass, replace

import numpy as np

from attention_contract.spec import AttentionSpec
from attention_contract.tensors import DTYPES, Array
from attention_service.core.kv_cache.attention import MOST_WIDENED
from attention_service.core.kv_cache.cuda_pages import workspace_bytes
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.cost import Estimate
from attention_service.runtime.binding.bound_request import BoundRequest, QueryLayout
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations.forward import PLAIN_FORWARD
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.planning.planner import PlanKey, plan_request

IN_PLACE = "in_place"
"""The name of attention over the pages, where a reply names its kernel."""
_PLAIN_SPEC = AttentionSpec()
_WORKSPACE = 2**20
"""Bytes of a pass in place beside its tokens and scores."""


_SMALLEST_PAST = 64
"""Tokens of the smallest bucket of pasts."""


def bucket(past: int) -> tuple[int, int]:
    """The shortest and the longest of the pasts that are planned together: an eighth apart, or few tokens."""
    width = max(_SMALLEST_PAST, 1 << max(past.bit_length() - 4, 0))
    last = -(-past // width) * width
    return max(last - width, 0), last


@dataclass(frozen=True)
class StepPlan:
    """The plan of one step, and of several like it in one pass."""

    plan: Plan
    attention: Estimate
    """The time of attention over the cache, a part of the predicted one."""
    past: int
    """The longest past that the plan is for."""
    token_flops: float
    """Operations for each token of the past."""
    sequences: int
    device: Device
    capacity: int

    @classmethod
    def of(cls, bound: BoundRequest, device: Device, capacity: int, fewest: BoundRequest) -> "StepPlan":
        """Plan a bound step, and all with a shorter past down to that of ``fewest``."""
        attention = _attention(bound, device, capacity)
        predicted = _projections(bound, device, capacity) + attention
        whole = plan_request(bound, PlanKey(), device, capacity, PLAIN_FORWARD)
        plan = replace(whole, kernel=IN_PLACE, predicted=predicted, peak_bytes=_peak_bytes(bound, device))
        tokens = bound.past - fewest.past
        less = whole.flops - plan_request(fewest, PlanKey(), device, capacity, PLAIN_FORWARD).flops if tokens else 0
        return cls(plan, attention, bound.past, less / max(tokens, 1), bound.batch, device, capacity)

    def at(self, past: int) -> Plan:
        """The plan of a step with this past. Where a window fills up, its operations are an estimate."""
        plan = self.plan
        flops = plan.flops - round((self.past - past) * self.token_flops)
        return Plan(plan.kernel, flops, plan.peak_bytes, plan.predicted, plan.off_loop, plan.result_bytes)

    def __call__(self, bound: BoundRequest, batch: int) -> Plan:
        """Plan a pass of so many sequences with the new tokens and the keys of one step."""
        together, times, one = bound.replaced(batch=batch), batch / self.sequences, self.attention
        predicted = _projections(together, self.device, self.capacity)
        predicted += Estimate(one.median * times, one.low * times, one.high * times)
        return Plan(IN_PLACE, round(self.plan.flops * times), _peak_bytes(together, self.device), predicted)


def _projections(bound: BoundRequest, device: Device, capacity: int) -> Estimate:
    """The time of a step without a past."""
    tokens = bound.replaced(past=0, keys=bound.queries, cached=None, arrays={"query": _blank(bound, bound.queries)})
    return plan_request(tokens, PlanKey(), device, capacity, PLAIN_FORWARD).predicted


def _attention(bound: BoundRequest, device: Device, capacity: int) -> Estimate:
    """The time of raw attention over as many keys, all of which every new token sees."""
    heads, kv_heads = (bound.batch, bound.heads), (bound.batch, bound.kv_heads)
    arrays = {
        "query": _blank(bound, *heads[1:], bound.queries, bound.head_dim),
        "key": _blank(bound, *kv_heads[1:], bound.keys, bound.head_dim),
        "value": _blank(bound, *kv_heads[1:], bound.keys, bound.value_dim),
    }
    raw = bound.replaced(module=None, layout=QueryLayout(), past=0, cached=None, spec=_PLAIN_SPEC, arrays=arrays)
    return plan_request(raw, PlanKey(), device, capacity, PLAIN_FORWARD).predicted


def _blank(bound: BoundRequest, *shape: int) -> Array:
    """A tensor of a request that takes no memory."""
    return np.broadcast_to(np.zeros((), DTYPES[bound.dtype]), (bound.batch, *shape))


def _peak_bytes(bound: BoundRequest, device: Device) -> int:
    """Bytes of the tokens, their projections and contexts, and of the scores in float32 or wider."""
    widths = (2 * bound.heads + bound.kv_heads) * (bound.head_dim + bound.value_dim) + 3 * bound.output_shape[-1]
    elements = bound.batch * bound.queries * (widths + 2 * bound.heads * bound.keys)
    size = TORCH_DTYPES[bound.dtype].itemsize
    by_pages = device.is_cuda and size < 4
    parts = workspace_bytes(bound.batch, bound.heads, bound.queries, bound.value_dim) if by_pages else 0
    return _WORKSPACE + parts + elements * max(size, 4) + (4 * MOST_WIDENED if size < 4 else 0)

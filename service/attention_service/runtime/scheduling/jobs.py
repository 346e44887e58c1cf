"""A job: one planned request, with the means to run it and to join it with others."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import torch

from attention_contract.base import with_tensors
from attention_contract.schemas.attention import AttentionInputs
from attention_contract.schemas.costs.accuracy import Computation
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.scheduling.operation import DeviceOperation, Fields, execute

RequestT = TypeVar("RequestT", bound=AttentionInputs)

SHORT_S = 0.05
"""A job that is predicted to take no longer, by its upper bound, is short: it does not wait behind long ones."""

_SHAPES: Final = frozenset(
    {"query", "key", "value", "mask", "past_key", "past_value", "initial_state", "initial_normalizer"}
)
"""The tensors of which planning reads the shape and the dtype alone."""
_FREE: Final = frozenset({"spec", "version", "encoding"})
"""Fields that a plan does not depend on, or whose content is compared otherwise."""


def is_short(plan: Plan) -> bool:
    """True if a job with this plan is predicted to take no longer than ``SHORT_S``."""
    return not plan.off_loop and plan.predicted.high <= SHORT_S


@dataclass(eq=False, slots=True)
class JobJoiner:
    """The means to run jobs of one module, or of raw attention, in one pass."""

    group: object
    """The same object for jobs of one module that can run in one pass."""
    plan: Callable[[BoundRequest, int], Plan]
    """Plans a pass of so many sequences with the lengths of one request."""
    mixed: Callable[[Sequence[BoundRequest]], DeviceOperation] | None = None
    """Makes the operation over different lengths; None if only equal ones can be joined."""
    longest_s: float | None = None
    """Seconds that the jobs of one pass would take one after the other, by the upper bounds of their predictions, at
    most; None for the limits of ``batches``."""


@dataclass(eq=False, slots=True)
class Prepared:
    """Everything about a planned request but its numbers and its module."""

    purpose: Computation
    plan: Plan
    dtype: str
    device: torch.device
    operation: Callable[[Any], DeviceOperation]
    """Makes the operation over a bound request, or over several stacked along the batch."""
    watched: bool = True
    """True if factors are learned from runs of this kind."""
    joining: JobJoiner | None = None
    """None for a job that always runs alone."""
    is_short: bool = field(init=False)
    """True if the job does not wait behind long ones."""

    def __post_init__(self) -> None:
        self.is_short = is_short(self.plan)

    def with_plan(self, plan: Plan) -> "Prepared":
        """The same by another plan."""
        return Prepared(
            self.purpose, plan, self.dtype, self.device, self.operation, watched=self.watched, joining=self.joining
        )


@dataclass(eq=False, slots=True)
class JobEnd:
    """The end of a job: from then on nothing of it runs, whether or not its caller still waits."""

    over: bool = False
    then: Callable[[], None] | None = None
    """Called at the end."""

    def now(self) -> None:
        """Note the end."""
        self.over = True
        if self.then is not None:
            self.then()


@dataclass(eq=False, slots=True)
class Job:
    """One planned request."""

    prepared: Prepared
    bound: Any
    """The request, bound: a ``BoundRequest``, or the bound retrieval of a Hopfield request."""
    module: Module | None = None
    ending: JobEnd | None = None
    """Hears of the end of the job; None if nobody needs to."""

    def run(self) -> Fields:
        """Upload, launch and collect; blocks until the reply's fields are on the host."""
        prepared = self.prepared
        return execute(prepared.operation(self.bound), prepared.device)

    @property
    def plan(self) -> Plan:
        """The plan of the job alone."""
        return self.prepared.plan

    @property
    def group(self) -> Hashable:
        """Equal for jobs that can run in one pass; None for a job that always runs alone."""
        joining = self.prepared.joining
        return None if joining is None else (id(self.module), id(joining.group))


def job_of_request(
    plan: Callable[[BoundRequest, RequestT, Device, int], Prepared],
    bound: BoundRequest,
    request: RequestT,
    device: Device,
    capacity: int,
) -> Job:
    """The job of a bound request. Requests that differ in their numbers alone are planned once.

    ``plan``: plans a bound request within so many bytes.
    """
    alike = _alike(bound, request)
    if alike is None:
        return Job(plan(bound, request, device, capacity), bound, bound.module)
    key = plan, alike, capacity.bit_length()
    prepared: Prepared | None = device.plans.find(device.clock, key)
    if prepared is None or prepared.plan.peak_bytes > capacity:
        # It is remembered without its tensors, whose memory would stay taken.
        tensors = {name: x for name, x in vars(request).items() if isinstance(x, np.ndarray)}
        blank = {name: np.broadcast_to(np.zeros((), x.dtype), x.shape).view(type(x)) for name, x in tensors.items()}
        prepared = plan(bound, with_tensors(request, blank), device, capacity)
        device.plans.keep(device.clock, key, prepared)
    return Job(prepared, bound, bound.module)


def _alike(bound: BoundRequest, request: AttentionInputs) -> Hashable:
    """Equal for requests that differ in their numbers alone; None if the plan depends on these, or options are long."""
    module = bound.module
    parts: list[Hashable] = [bound.spec.model_dump_json() if module is None else module.config_json]
    for name in request.__pydantic_fields_set__:
        value = getattr(request, name)
        if isinstance(value, np.ndarray):
            if name not in _SHAPES:
                return None
            parts.append((name, value.shape, value.dtype, type(value)))
        elif isinstance(value, dict):
            if value:
                return None
        elif name not in _FREE:
            parts.append((name, *value) if isinstance(value, list) else (name, value))
    try:
        return frozenset(parts)
    except TypeError:  # options with lists or tensors of their own
        return None

"""A job: one planned request, with the means to run it and to join it with others."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attention_contract.request_options import Outline
from attention_contract.schemas.accuracy import Computation
from attention_contract.schemas.attention import AttentionInputs
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.scheduling.operation import Fields, Operation, execute

SHORT_S = 0.05
"""A job that is predicted to take no longer, by its upper bound, is short: it does not wait behind long ones."""


def is_short(plan: Plan) -> bool:
    """True if a job with this plan is predicted to take no longer than ``SHORT_S``."""
    return not plan.slow_masks and plan.predicted.high <= SHORT_S


@dataclass(eq=False, slots=True)
class Joining:
    """The means to run jobs of one module, or of raw attention, in one pass."""

    group: object
    """The same object for jobs of one module that can run in one pass."""
    plan: Callable[[BoundRequest, int], Plan]
    """Plans a pass of so many sequences with the lengths of one request."""
    mixed: Callable[[Sequence[BoundRequest]], Operation] | None = None
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
    operation: Callable[[Any], Operation]
    """Makes the operation over a bound request, or over several stacked along the batch."""
    watched: bool = True
    """True if factors are learned from runs of this kind."""
    joining: Joining | None = None
    """None for a job that always runs alone."""

    def with_plan(self, plan: Plan) -> "Prepared":
        """The same by another plan."""
        return Prepared(
            self.purpose, plan, self.dtype, self.device, self.operation, watched=self.watched, joining=self.joining
        )

    @property
    def is_short(self) -> bool:
        """True if the job does not wait behind long ones."""
        return is_short(self.plan)


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

    def without_module(self) -> "Job":
        """The job to be remembered: it keeps no parameters in memory."""
        return Job(self.prepared, self.bound.replaced(module=None))

    def with_arrays(self, module: Module | None, request: AttentionInputs, outline: Outline) -> "Job":
        """The same job over the tensors of another request of the same outline."""
        arrays = dict(self.bound.arrays)
        for name, _, shape in outline.tensors:
            if name in arrays:
                array, like = getattr(request, name), arrays[name]
                arrays[name] = array if like.shape == shape else array.reshape(like.shape)
        return Job(self.prepared, self.bound.replaced(module=module, arrays=arrays), module)

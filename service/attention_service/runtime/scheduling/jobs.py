"""A job: one planned request, with the means to run it and to join it with others."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from attention_contract.schemas.accuracy import Purpose
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound import Bound
from attention_service.runtime.operations.operation import Fields, Operation, execute
from attention_service.runtime.planning.plan import Plan

SHORT_S = 0.05
"""A job that is predicted to take no longer, by its upper bound, is short: it does not wait behind long ones."""
Size = tuple[int, int, int]
"""Batch, queries and keys."""


@dataclass(eq=False, slots=True)
class Joins:
    """The means to run requests in one pass."""

    key: Hashable
    """Equal for requests that can run in one pass."""
    bound: Bound
    operation: Callable[[Bound], Operation]
    """Makes the operation over these tensors, or over those of several requests stacked along the batch."""
    plan: Callable[[Size], Plan]
    """Plans a pass of equal lengths."""
    mixed: Callable[[Sequence[Bound]], Operation] | None = None
    """Makes the operation over different lengths; None if only equal ones can be joined."""


@dataclass(eq=False, slots=True)
class Job:
    """One planned operation on a device."""

    purpose: Purpose
    plan: Plan
    dtype: str
    module: Module | None
    operation: Operation
    device: torch.device
    watched: bool = True
    """True if a calibration measures requests of this kind."""
    make_joins: Callable[[], Joins] | None = None
    """Makes ``joins``; None for a job that always runs alone."""
    mixing: Module | None = None
    """The module, if requests of different lengths run in one pass."""
    _joins: Joins | None = None

    def run(self) -> Fields:
        """Upload, launch and collect; blocks until the reply's fields are on the host."""
        return execute(self.operation, self.device)

    @property
    def joins(self) -> Joins | None:
        """The means to join the job with others; None if it runs alone. Made only if others wait."""
        if self._joins is None and self.make_joins is not None:
            self._joins = self.make_joins()
        return self._joins

    @property
    def kind(self) -> int:
        """Equal for jobs that can most likely run in one pass: those of one cached plan, or of one large module."""
        return id(self.plan if self.mixing is None else self.mixing)

    @property
    def is_short(self) -> bool:
        """True if the job is predicted to take no longer than ``SHORT_S``."""
        return not self.plan.laborious and self.plan.predicted.high <= SHORT_S

"""A job: what one request asks of the device, planned and ready to run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attention_contract.schemas.accuracy import Purpose
from attention_service.modules.resident import Module
from attention_service.runtime.operations.operation import Fields, Operation, execute
from attention_service.runtime.planning.planner import Plan

if TYPE_CHECKING:
    from attention_service.runtime.scheduling.joining import Part


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
    """Whether requests of its kind are among those that a calibration measures."""
    make_part: "Callable[[], Part] | None" = None
    """Makes ``part``; None for what is run alone."""
    _part: "Part | None" = None

    def run(self) -> Fields:
        """Upload, launch and collect; blocks until the reply's fields are on the host."""
        return execute(self.operation, self.device)

    @property
    def part(self) -> "Part | None":
        """As a part of a batch; None for what is run alone. Made where others wait beside it."""
        if self._part is None and self.make_part is not None:
            self._part = self.make_part()
        return self._part

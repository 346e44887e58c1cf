"""The operation that every analysis is, and the job that runs it."""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from attention_contract.schemas.costs.accuracy import Computation
from attention_service.modules.resident import Module
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.scheduling.jobs import Job, Prepared
from attention_service.runtime.scheduling.operation import DeviceOperation, Results, Uploaded


class Analyzed(Protocol):
    """One request for an analysis, checked."""

    def results(self, device: torch.device) -> Results:
        """Compute the fields of the reply, tile by tile in float64. Raises an AttentionError for unfit numbers."""


@dataclass(eq=False, slots=True)
class Analysis(DeviceOperation):
    """The operation of one request: each part is read when it is needed."""

    bound: Analyzed
    device: torch.device

    def upload(self, device: torch.device) -> Uploaded:
        """Upload nothing."""
        return Uploaded({})

    def launch(self, uploaded: Uploaded) -> Results:
        """Read and compute."""
        return self.bound.results(self.device)


def analysis_job(
    bound: Analyzed, purpose: Computation, plan: Plan, device: Device, module: Module | None = None
) -> Job:
    """Return the job of a planned analysis, which runs alone."""
    operation = partial(Analysis, device=device.torch)
    return Job(Prepared(purpose, plan, "float64", device.torch, operation, watched=False), bound, module)

"""The passes whose memory is rehearsed: those that a server runs, which it registers here."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from attention_service.core.kernels import Kernel
from attention_service.cost.retrieval import Retrieval
from attention_service.cost.workload import Workload


class Passes(Protocol):
    """Passes over meta tensors of given sizes. Each returns the results of one request."""

    def parameters(self, work: Workload) -> Mapping[str, Tensor]:
        """The parameters of a resident module; none for raw attention."""

    def forward(self, work: Workload, kernel: Kernel, parameters: Mapping[str, Tensor]) -> object:
        """Run one forward pass."""

    def gradients(
        self,
        work: Workload,
        kernel: Kernel,
        parameters: Mapping[str, Tensor],
        names: tuple[str, ...],
        *,
        twice: bool,
        checked: bool,
    ) -> object:
        """Run a forward and a backward pass; as asked, a second backward pass and a check."""

    def inspection(self, work: Workload, parameters: Mapping[str, Tensor], top_k: int) -> object:
        """Look at the weights."""

    def attribution(
        self, work: Workload, parameters: Mapping[str, Tensor], methods: tuple[str, ...], *,
        compared: bool, points: int, classes: int,
    ) -> object:  # fmt: skip
        """Attribute to weights and heads; as asked, compare, or differentiate L at points of a path."""

    def retrieval(self, sizes: Retrieval) -> object:
        """Run one Hopfield retrieval."""


_REGISTERED: list[Passes] = []


def rehearse_with(passes: Passes) -> None:
    """Register the passes."""
    _REGISTERED[:] = [passes]


def registered() -> Passes:
    """Return the registered passes. Raises RuntimeError if there are none: import ``attention_service.runtime``."""
    if not _REGISTERED:
        raise RuntimeError("no passes are registered: import attention_service.runtime")
    return _REGISTERED[0]

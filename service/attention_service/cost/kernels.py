"""The kernel of a workload, for the facts that it states of itself."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from attention_contract.spec import AttentionSpec
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels import KERNELS, Kernel, Needs
from attention_service.core.types import Problem
from attention_service.cost.approximate import approximated
from attention_service.cost.workload import Workload


def kernel_of(work: Workload, name: str) -> Kernel:
    """Return the kernel of this name; for a method that approximates, its own arithmetic.

    Raises KeyError for a name that is not registered.
    """
    return KERNELS[name].make() if approximated(work) is None else _OWN


class _OwnArithmetic(Kernel):
    """A method that approximates: its costs are its own, and no kernel computes it."""

    recomputes = True

    def attend(self, problem: Problem, taps: Collection[str], edits: Sequence[BoundEdit]) -> dict[str, Tensor]:
        """Raise: ``core.attend`` asks the method."""
        raise NotImplementedError("a method that approximates has no kernel")

    def unsuitable(self, spec: AttentionSpec, dtype: torch.dtype, needs: Needs) -> Iterator[str]:
        """Yield nothing."""
        yield from ()


_OWN = _OwnArithmetic()

"""Methods: how the context comes about, exactly or approximately."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from attention_contract import spec
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels.base import Kernel
from attention_service.core.registry import Registry
from attention_service.core.types import Problem


class Method(Protocol):
    """A way to the context."""

    def attend(
        self, problem: Problem, kernel: Kernel, taps: Collection[str], edits: Sequence[BoundEdit]
    ) -> dict[str, Tensor]:
        """``context`` ``[B, H, Q, V]``, and those of the taps, whole, that it has in memory anyway."""


METHODS = Registry[Method]("method")


@METHODS.register(
    spec.Exact,
    formula="o_i = Σ_j w_ij v_j over every key that the masks allow",
    cost="O(n²·d)",
    source="Vaswani et al. 2017, eq. 1",
)
@dataclass(frozen=True)
class Exact:
    """Every query against every key."""

    options: spec.Exact

    def attend(
        self, problem: Problem, kernel: Kernel, taps: Collection[str], edits: Sequence[BoundEdit]
    ) -> dict[str, Tensor]:
        """As the kernel computes it."""
        return kernel.attend(problem, taps, edits)

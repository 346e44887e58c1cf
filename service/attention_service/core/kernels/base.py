"""What a kernel is."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attention_contract.spec import AttentionSpec
from attention_service.core.edits import BoundEdit
from attention_service.core.registry import Registry
from attention_service.core.types import Problem


@dataclass(frozen=True)
class Needs:
    """What is asked of a kernel beside the spec."""

    edits: bool = False
    """Some tap is edited."""
    dropout: bool = False
    """Weights are dropped."""
    taps_gradient: bool = False
    """A gradient with respect to a tap other than q, k, v or context is wanted."""
    double_backward: bool = False
    """A gradient of a gradient is wanted."""
    device: str = "cpu"
    """The type of the device."""


class Kernel(Protocol):
    """One way to compute the context."""

    def attend(self, problem: Problem, taps: Collection[str], edits: Sequence[BoundEdit]) -> dict[str, Tensor]:
        """``context`` ``[B, H, Q, V]``, and those of the taps, whole, that it has in memory anyway."""

    def unsuitable(self, spec: AttentionSpec, dtype: torch.dtype, needs: Needs) -> Iterator[str]:
        """Each reason why it cannot, with q, k and v of this dtype."""


KERNELS = Registry[Kernel]("kernel")

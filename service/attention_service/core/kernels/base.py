"""What a kernel is."""

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from attention_contract.spec import AttentionSpec
from attention_service.core.edits import BoundEdit
from attention_service.core.registry import Registry
from attention_service.core.types import Problem


class Kernel(Protocol):
    """One way to compute the context."""

    def attend(self, problem: Problem, taps: Collection[str], edits: Sequence[BoundEdit]) -> dict[str, Tensor]:
        """``context`` ``[B, H, Q, V]``, and those of the taps, whole, that it has in memory anyway."""

    def unsuitable(
        self,
        spec: AttentionSpec,
        dtype: torch.dtype,
        *,
        edits: bool,
        dropout: bool,
        taps_gradient: bool,
        double_backward: bool,
    ) -> Iterator[str]:
        """Each reason why it cannot."""


KERNELS = Registry[Kernel]("kernel")

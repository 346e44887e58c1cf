"""The formula written out, with every score and weight in memory."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from attention_contract.spec import AttentionSpec
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels.base import KERNELS, Needs
from attention_service.core.stages import stages
from attention_service.core.types import Problem


@KERNELS.register(
    "materialized",
    formula="softmax(cap(q·k · scale) + mask) · v, stage by stage",
    gradient="through every stage, for every tap; twice differentiable",
    cost="O(n²·d) time, O(n²) memory",
    source="Vaswani et al. 2017, eq. 1",
)
class Materialized:
    """Keeps the whole [B, H, Lq, Lk] of scores and weights: takes every spec, edit and gradient."""

    def attend(self, problem: Problem, taps: Collection[str], edits: Sequence[BoundEdit]) -> dict[str, Tensor]:
        """All stages, of which those asked for are kept."""
        return dict(stages(problem, {*taps, "context"}, edits))

    def unsuitable(self, spec: AttentionSpec, dtype: torch.dtype, needs: Needs) -> Iterator[str]:
        """Nothing is."""
        yield from ()

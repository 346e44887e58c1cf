"""The formula written out, with every score and weight in memory."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from attention_contract.spec import AttentionSpec
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels.base import KERNELS, PAIR_TAPS, Kernel, Needs
from attention_service.core.problem import Problem
from attention_service.core.stages import stages

MATERIALIZED = "materialized"
"""The name of the kernel that can do everything, by which the others are judged."""


@KERNELS.register(
    MATERIALIZED,
    formula="softmax(cap(q·k · scale) + mask) · v, stage by stage",
    gradient="through every stage, for every tap; twice differentiable",
    cost="O(n²·d) time, O(n²) memory",
    source="Vaswani et al. 2017, eq. 1",
)
class Materialized(Kernel):
    """Keeps the whole [B, H, Lq, Lk] of scores and weights: takes every spec, edit and gradient."""

    keeps = PAIR_TAPS
    by_stages = True
    automatic = True

    def attend(self, problem: Problem, taps: Collection[str], edits: Sequence[BoundEdit]) -> dict[str, Tensor]:
        """Compute all stages, and keep those that are asked for."""
        return dict(stages(problem, {*taps, "context"}, edits))

    def unsuitable(self, spec: AttentionSpec, dtype: torch.dtype, needs: Needs) -> Iterator[str]:
        """Yield nothing: it can do everything."""
        yield from ()

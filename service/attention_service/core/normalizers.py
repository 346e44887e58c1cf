"""Normalizers: from scores to weights."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attention_contract import spec
from attention_service.core.registry import Registry


class Normalizer(Protocol):
    """How the masked scores of one query become its weights. A query whose scores are all −∞ gets zeros."""

    def runs_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the computation for inputs of this dtype."""

    def weights(self, masked_scores: Tensor) -> Tensor:
        """``[..., K]`` to ``[..., K]``, in the dtype of the computation."""

    def lse(self, masked_scores: Tensor) -> Tensor:
        """``[..., K]`` to ``[...]``: the logarithm of what the weights are divided by."""


NORMALIZERS = Registry[Normalizer]("normalizer")


@NORMALIZERS.register(
    spec.Softmax,
    formula="w_j = exp(s_j/T) / Σ_k exp(s_k/T), T = temperature",
    cost="O(n²)",
    source="Vaswani et al. 2017, eq. 1; temperature: Hinton et al. 2015, eq. 1",
)
@dataclass(frozen=True)
class Softmax:
    """softmax(s / T) over the keys."""

    options: spec.Softmax

    def runs_in(self, dtype: torch.dtype) -> torch.dtype:
        """The wider of the inputs' dtype and the one asked for; a half type is taken as asked."""
        asked: torch.dtype = getattr(torch, self.options.dtype)
        return asked if asked.itemsize < torch.float32.itemsize else torch.promote_types(dtype, asked)

    def weights(self, masked_scores: Tensor) -> Tensor:
        """exp(s/T − lse)."""
        seeing, blind = self._seeing(masked_scores)
        weights = seeing.softmax(-1)
        del seeing  # one tensor of this size fewer in memory at the peak
        return weights.masked_fill(blind, 0)

    def lse(self, masked_scores: Tensor) -> Tensor:
        """The logarithm of Σ exp(s/T); −∞ for a query that may look nowhere."""
        seeing, blind = self._seeing(masked_scores)
        return seeing.logsumexp(-1).masked_fill(blind.squeeze(-1), -torch.inf)

    def _seeing(self, masked_scores: Tensor) -> tuple[Tensor, Tensor]:
        """s/T with the rows of blind queries made finite, and which rows those are.

        Both ends of the softmax must be filled: a row of −∞ is 0/0 forward, and its NaN would come back through the
        gradient of anything that only covers it afterwards.
        """
        tempered = masked_scores.to(self.runs_in(masked_scores.dtype))
        if self.options.temperature != 1:
            tempered = tempered / self.options.temperature
        blind = (tempered == -torch.inf).all(-1, keepdim=True)  # [..., 1]
        return tempered.masked_fill(blind, 0), blind

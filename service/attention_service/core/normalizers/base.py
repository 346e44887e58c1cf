"""What a normalizer is, and what several have in common."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from attention_contract import spec
from attention_service.core.registry import Registry
from attention_service.core.types import Learned, Widths

NOTHING: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class PairCost:
    """FLOPs of a normalizer for each query-key pair of each head, without the division by the temperature."""

    flops: int
    backward_flops: int


class Normalizer(Protocol):
    """How the masked scores of one query become its weights. A query whose scores are all −∞ gets zeros."""

    separable: bool
    """Whether each weight depends on its own score alone."""

    def runs_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the computation for inputs of this dtype."""

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Its learned tensors by name."""

    def weights(
        self, masked_scores: Tensor, lengths: Tensor | None = None, learned: Mapping[str, Tensor] = NOTHING
    ) -> Tensor:
        """``[B, H, Q, K]`` to ``[B, H, Q, K]``, in the dtype of the computation.

        lengths ``[B]``: how many keys of each sequence are no padding; None where all are.
        """

    def cost(self, keys: int) -> PairCost:
        """FLOPs for rows of so many keys."""


@runtime_checkable
class Exponential(Protocol):
    """A normalizer whose weights are exponentials divided by their sum, so that the logarithm of the sum tells all."""

    def lse(self, masked_scores: Tensor, learned: Mapping[str, Tensor] = NOTHING) -> Tensor:
        """``[B, H, Q, K]`` to ``[B, H, Q]``: the logarithm of what the weights are divided by."""


NORMALIZERS = Registry[Normalizer]("normalizer")


def has_lse(options: spec.Normalizer) -> bool:
    """Whether the tap ``lse`` has a meaning."""
    return hasattr(NORMALIZERS.of(options), "lse")  # as Exponential asks, and tenfold as fast


class Plain:
    """A normalizer that learns nothing."""

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """None."""
        return {}


def tempered_scores(masked_scores: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """In the dtype that is normalized in, over the temperature."""
    x = masked_scores.to(dtype)
    return x if temperature == 1 else x / temperature


def widened(dtype: torch.dtype, name: str) -> torch.dtype:
    """The dtype of this name, or the scores' own where that is wider and half precision is not asked for."""
    asked: torch.dtype = getattr(torch, name)
    return asked if asked.itemsize < torch.float32.itemsize else torch.promote_types(dtype, asked)

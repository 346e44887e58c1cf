"""Protocol and registry of normalizers, with common functions."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from attention_contract import spec
from attention_service.core.problem import Learned, Widths
from attention_service.core.registry import Registry

NOTHING: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class PairCost:
    """FLOPs of a normalizer for each query-key pair of each head, without the division by the temperature."""

    flops: int
    backward_flops: int


class Normalizer(Protocol):
    """Function from the masked scores of a query to its weights. A query with only −∞ gets zeros."""

    def runs_in(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the computation for inputs of this dtype."""

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Return the learned tensors by name."""

    def weights(
        self, masked_scores: Tensor, lengths: Tensor | None = None, learned: Mapping[str, Tensor] = NOTHING
    ) -> Tensor:
        """Return the weights ``[B, H, Q, K]`` of masked scores ``[B, H, Q, K]``, in the dtype of the computation.

        lengths ``[B]``: number of real keys of each sequence; None if all keys are real.
        """

    def cost(self, keys: int) -> PairCost:
        """FLOPs for rows of so many keys."""


@runtime_checkable
class Exponential(Protocol):
    """Normalizer whose weights are exponentials divided by their sum."""

    def lse(self, masked_scores: Tensor, learned: Mapping[str, Tensor] = NOTHING) -> Tensor:
        """Return the logarithm of the sum, ``[B, H, Q]``, for masked scores ``[B, H, Q, K]``."""


NORMALIZERS = Registry[Normalizer]("normalizer")


def has_lse(options: spec.Normalizer) -> bool:
    """Return True if the normalizer has the tap ``lse``."""
    return hasattr(NORMALIZERS.of(options), "lse")  # equals isinstance(…, Exponential), ten times as fast


def has_log_weights(options: spec.Normalizer) -> bool:
    """Return True for a softmax of the scores alone, in float32 or better."""
    return isinstance(options, spec.Softmax) and not options.sinks and options.dtype in {"float32", "float64"}


class Plain:
    """Normalizer without learned tensors, computed in at least the dtype of its options."""

    options: spec.Normalizer

    def runs_in(self, dtype: torch.dtype) -> torch.dtype:
        """Return the wider of the inputs' dtype and the option's dtype; a half type is used as given."""
        chosen: torch.dtype = getattr(torch, self.options.dtype)
        return chosen if chosen.itemsize < torch.float32.itemsize else torch.promote_types(dtype, chosen)

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Return no learned tensors."""
        return {}


def tempered_scores(masked_scores: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """Convert the scores to the dtype of the computation and divide them by the temperature."""
    x = masked_scores.to(dtype)
    return x if temperature == 1 else x / temperature

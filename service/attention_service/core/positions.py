"""Position encodings: what tells queries and keys apart by where they stand."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from attention_contract import spec
from attention_service.core.registry import Registry


class Position(Protocol):
    """An encoding of the queries' and keys' places, applied before the score."""

    def encode(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """For q ``[B, H, Q, D]`` and k ``[B, Hkv, K, D]``, tensors of the same shapes."""


POSITIONS = Registry[Position]("position")


@POSITIONS.register(
    spec.NoPosition,
    formula="q, k as they are",
    cost="O(1)",
    source="Vaswani et al. 2017, section 3.5 (what attention is without an encoding)",
)
@dataclass(frozen=True)
class NoPosition:
    """Nothing is added."""

    options: spec.NoPosition

    def encode(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The same queries and keys."""
        return q, k

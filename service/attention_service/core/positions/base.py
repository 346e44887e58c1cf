"""What a position encoding is, and the one that is none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attention_contract import positions as options
from attention_service.core.places import Places
from attention_service.core.registry import Registry
from attention_service.core.types import Learned, Widths

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Heads:
    """Some of the query heads."""

    count: int
    """H: how many there are."""
    picked: Sequence[int] | None = None
    """Which of them, in this order; None for all."""


@dataclass(frozen=True)
class PositionCost:
    """What an encoding costs, in FLOPs but where it is said otherwise. Places are integers, and count nothing."""

    place: int = 0
    """To make what belongs to one place, whatever the heads."""
    added: int = 0
    """For each vector that it is added to."""
    turned: int = 0
    """For each query and new key of each head, forward and once more backward."""
    pair: int = 0
    """For each query-key pair of each head."""
    pair_backward: int = 0


class Position(Protocol):
    """An encoding of places. One that does not do a thing gives back what it was given, or None."""

    reads: bool
    """Whether places make a difference, so that a request may give them."""
    biased: bool
    """Whether ``bias`` gives one."""

    @property
    def by_reach(self) -> bool:
        """Whether what a token gets depends on how far its sequence reaches."""

    @property
    def length(self) -> int | None:
        """How many places it has an encoding for, from 0 on; None where it has one for any."""

    def fault(self, widths: Widths, inputs: Sequence[int]) -> tuple[str, str] | None:
        """The option at fault (or "") and why, where it cannot be at these widths.

        inputs: how wide query, key and value of a module come; none for raw q and k.
        """

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Its learned tensors by name."""

    def added(self, x: Tensor, places: Tensor, learned: Tensors) -> Tensor:
        """X with the encoding added: the inputs of a module ``[B, L, W]``, or raw q and k ``[B, H, L, D]``.

        places ``[1 or B, L]``.
        """

    def turned(self, q: Tensor, k: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Queries ``[B, H, Q, D]`` and new keys ``[B, Hkv, K − P, D]``, each as its place makes it."""

    def bias(self, queries: Tensor, keys: Tensor, heads: Heads, learned: Tensors, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores of these queries and keys, whichever of them those are: ``[1 or B, H, Q, K]``.

        queries ``[1 or B, Q]`` and keys ``[1 or B, K]`` are places; the learned tensors are of all heads.
        """

    def cost(self, head_dim: int, width: int) -> PositionCost:
        """What it costs for heads so wide, and for what it is added to."""


class Inert:
    """What an encoding does unless it says otherwise: nothing."""

    reads = True
    biased = False

    @property
    def by_reach(self) -> bool:
        """It does not."""
        return False

    @property
    def length(self) -> int | None:
        """Any place will do."""
        return None

    def fault(self, widths: Widths, inputs: Sequence[int]) -> tuple[str, str] | None:
        """Nothing is wrong."""
        return None

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Nothing."""
        return {}

    def added(self, x: Tensor, places: Tensor, learned: Tensors) -> Tensor:
        """X as it is."""
        return x

    def turned(self, q: Tensor, k: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Q and k as they are."""
        return q, k

    def bias(self, queries: Tensor, keys: Tensor, heads: Heads, learned: Tensors, dtype: torch.dtype) -> Tensor | None:
        """None."""
        return None

    def cost(self, head_dim: int, width: int) -> PositionCost:
        """Nothing."""
        return PositionCost()


POSITIONS = Registry[Position]("position")


@POSITIONS.register(
    options.NoPosition,
    formula="q, k unchanged",
    gradient="∂q and ∂k unchanged",
    cost="O(1)",
    source="Vaswani et al. 2017, section 3.5 (attention without an encoding)",
)
@dataclass(frozen=True)
class NoPosition(Inert):
    """Nothing is added."""

    options: options.NoPosition
    reads = False

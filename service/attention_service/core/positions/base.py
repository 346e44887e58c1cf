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
    """To make what belongs to one place, for all heads."""
    token: int = 0
    """For each token in each role (query, key, value of a module), at the width of its input."""
    head: int = 0
    """For each new query and key of each head; the backward pass takes as many."""
    pair: int = 0
    """For each query-key pair of each head."""
    pair_backward: int = 0
    held: int = 0
    """Bytes held for each place at the peak, whatever the heads."""


class Position(Protocol):
    """An encoding of places. One that does not do a thing gives back what it was given, or None."""

    reads: bool
    """Whether places make a difference, so that a request may give them."""
    biased: bool
    """Whether ``bias`` gives one."""

    def faults(self, widths: Widths) -> str | None:
        """Why it cannot be at these widths, naming the option at fault first (``dim: …``); None where it can."""

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

    def cost(self, widths: Widths, inputs: int) -> PositionCost:
        """What it costs where tokens come in ``inputs`` wide; 0 stands for raw q and k."""


class Inert:
    """What an encoding does unless it says otherwise: nothing."""

    reads = True
    biased = False

    def faults(self, widths: Widths) -> str | None:
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

    def cost(self, widths: Widths, inputs: int) -> PositionCost:
        """Nothing."""
        return PositionCost()


POSITIONS = Registry[Position]("position")


@POSITIONS.register(
    options.NoPosition,
    formula="q, k as they are",
    cost="O(1)",
    source="Vaswani et al. 2017, section 3.5 (what attention is without an encoding)",
)
@dataclass(frozen=True)
class NoPosition(Inert):
    """Nothing is added."""

    options: options.NoPosition
    reads = False

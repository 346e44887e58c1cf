"""Scores: how well a query and a key agree."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from attention_contract import spec
from attention_service.core.groups import product
from attention_service.core.registry import Registry


class Score(Protocol):
    """s(q, k) for every query and key."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """From q ``[B, H, Q, D]`` and k ``[B, Hkv, K, D]`` to ``[B, H, Q, K]``."""

    def factor(self, width: int) -> float | None:
        """The number f for which s(q, k) = f · q·k at head width D; None where the score is no such product."""


SCORES = Registry[Score]("score")


@SCORES.register(spec.Dot, formula="q·k", cost="O(n²·d)", source="Luong et al. 2015, eq. 8")
@dataclass(frozen=True)
class Dot:
    """s = q·k."""

    options: spec.Dot

    def factor(self, width: int) -> float:
        """1: the product as it is."""
        return 1.0

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Q Kᵀ."""
        return product(q, k.mT)


@SCORES.register(
    spec.ScaledDot, formula="q·k · scale, scale = 1/√d by default", cost="O(n²·d)", source="Vaswani et al. 2017, eq. 1"
)
@dataclass(frozen=True)
class ScaledDot:
    """s = q·k · scale."""

    options: spec.ScaledDot

    def factor(self, width: int) -> float:
        """The scale asked for, or 1/√D."""
        return width**-0.5 if self.options.scale is None else self.options.scale

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """(Q · scale) Kᵀ, since scaling the queries is D/K of the work of scaling the scores."""
        return product(q * self.factor(q.shape[-1]), k.mT)

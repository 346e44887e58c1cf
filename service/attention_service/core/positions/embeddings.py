"""Encodings that are added to what comes in."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from attention_contract import positions as options
from attention_service.core.positions.base import POSITIONS, Inert, PositionCost, Tensors
from attention_service.core.types import Learned, Widths

TABLE = "position.weight"


@POSITIONS.register(
    options.Sinusoidal,
    formula="x_p + (sin p·f_0, cos p·f_0, sin p·f_1, …), f_c = θ^(−2c/d)",
    gradient="∂x_p unchanged",
    cost="O(n·d)",
    source="Vaswani et al. 2017, section 3.5",
)
@dataclass(frozen=True)
class Sinusoidal(Inert):
    """Waves from 2π to 2π·θ long, each as a sine and a cosine beside each other."""

    options: options.Sinusoidal

    def added(self, x: Tensor, places: Tensor, learned: Tensors) -> Tensor:
        """The angles are found in float64, and the sum in float32 at least."""
        width = x.shape[-1]
        pairs = torch.arange(0, width, 2, dtype=torch.float64, device=x.device)
        angles = places[..., None] * torch.exp(pairs * (-log(self.options.theta) / width))  # [1 or B, L, ⌈W/2⌉]
        waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., :width]
        return _sum(x, waves)

    def cost(self, head_dim: int, width: int) -> PositionCost:
        """An angle for two numbers, a sine or cosine and a sum for each."""
        return PositionCost(place=width + (width + 1) // 2, added=width)


@POSITIONS.register(
    options.LearnedPosition,
    formula="x_p + E_p",
    gradient="∂x_p unchanged, ∂E_p = Σ ∂x_p over the sequences",
    cost="O(n·d)",
    source="Gehring et al. 2017, section 3.1",
)
@dataclass(frozen=True)
class LearnedPosition(Inert):
    """A vector for each place."""

    options: options.LearnedPosition

    @property
    def length(self) -> int | None:
        """As many as the table has rows."""
        return self.options.length

    def fault(self, widths: Widths, inputs: Sequence[int]) -> tuple[str, str] | None:
        """One table must fit every input."""
        if len(set(inputs)) <= 1:
            return None
        told = ", ".join(map(str, inputs))
        return "", f"query, key and value come {told} wide, and one table is added to each; give them one width"

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """As wide as the inputs of a module, or as a head of raw q and k."""
        width = widths.head_dim if widths.d_model is None else widths.d_model
        return {TABLE: Learned((self.options.length, width), heads=None)}

    def added(self, x: Tensor, places: Tensor, learned: Tensors) -> Tensor:
        """The rows of the table; that each place has one is known before it comes here."""
        return _sum(x, learned[TABLE][places])  # [1 or B, L, W]

    def cost(self, head_dim: int, width: int) -> PositionCost:
        """A sum for each number."""
        return PositionCost(added=width)


def _sum(x: Tensor, encoding: Tensor) -> Tensor:
    """The encoding ``[1 or B, L, W]`` added to x ``[B, L, W]`` or ``[B, H, L, W]``."""
    if x.ndim == 4:
        encoding = encoding[:, None]
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) + encoding.to(wide)).to(x.dtype)

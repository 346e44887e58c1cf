"""Position encodings that are added to the inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from attention_contract import positions as options
from attention_service.core.positions.base import POSITIONS, Inert, PositionCost, Tensors
from attention_service.core.problem import Learned, Widths

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
    """Alternating sines and cosines of wavelengths from 2π to 2π·θ."""

    options: options.Sinusoidal

    def added(self, x: Tensor, places: Tensor, learned: Tensors) -> Tensor:
        """Add the encoding. Angles are float64, and the sum is float32 or wider."""
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
    """Learned vector per place."""

    options: options.LearnedPosition

    @property
    def length(self) -> int | None:
        """Number of rows of the table."""
        return self.options.length

    def fault(self, widths: Widths, inputs: Sequence[int]) -> tuple[str, str] | None:
        """Return a fault if the inputs have different widths, because one table is added to each."""
        if len(set(inputs)) <= 1:
            return None
        widths_named = ", ".join(map(str, inputs))
        return (
            "",
            f"query, key and value have the widths {widths_named}, and one table is added to each; give them one width",
        )

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Return the table. Its width is that of a module's inputs, or of a head of raw q and k."""
        width = widths.head_dim if widths.d_model is None else widths.d_model
        return {TABLE: Learned((self.options.length, width), heads=None)}

    def added(self, x: Tensor, places: Tensor, learned: Tensors) -> Tensor:
        """Add the rows of the table. Binding has checked that every place has a row."""
        return _sum(x, learned[TABLE][places])  # [1 or B, L, W]

    def cost(self, head_dim: int, width: int) -> PositionCost:
        """Count one addition per number."""
        return PositionCost(added=width)


def _sum(x: Tensor, encoding: Tensor) -> Tensor:
    """Add the encoding ``[1 or B, L, W]`` to x ``[B, L, W]`` or ``[B, H, L, W]``."""
    if x.ndim == 4:
        encoding = encoding[:, None]
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) + encoding.to(wide)).to(x.dtype)

"""Rotary position embedding: rotated queries and keys, whose product depends on their distance."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_contract import positions as options
from attention_service.core.positions.base import POSITIONS, Inert, PositionCost
from attention_service.core.positions.frequencies import frequencies
from attention_service.core.positions.token_positions import TokenPositions
from attention_service.core.problem import Widths


@POSITIONS.register(
    options.Rope,
    formula="x_a + i·x_b → (x_a + i·x_b)·exp(i·p·f_c) for each pair c of dimensions, f_c = θ^(−2c/dim)",
    gradient="rotated back: (∂x_a + i·∂x_b)·exp(−i·p·f_c)",
    cost="O(n·d)",
    source="Su et al. 2021, section 3.4; scaling: Chen et al. 2023, Peng et al. 2023, Ding et al. 2024",
)
@dataclass(frozen=True)
class Rope(Inert):
    """Rotation of each pair of dimensions by place · frequency."""

    options: options.Rope

    def fault(self, widths: Widths, inputs: Sequence[int]) -> tuple[str, str] | None:
        """Return a fault unless the number of dimensions is even and at most the head width."""
        width, dim = widths.head_dim, self.options.dim
        if dim is None and width % 2:
            return "dim", f"a head is {width} wide, and dimensions turn in pairs; give an even dim below that"
        if dim is not None and dim > width:
            return "dim", f"{dim} dimensions are to turn where a head has {width}; give {width - width % 2} or fewer"
        if dim is None and width == 2 and isinstance(self.options.scaling, options.NtkScaling):
            return "scaling", "ntk needs 4 dimensions or more, and a head is 2 wide; leave scaling out"
        scaling, pairs = self.options.scaling, (width if dim is None else dim) // 2
        if isinstance(scaling, options.LongRopeScaling) and len(scaling.long_factor) != pairs:
            return "scaling", f"its lists have {len(scaling.long_factor)} numbers, and {pairs} pairs turn; give as many"
        return None

    def rotated(self, q: Tensor, k: Tensor, places: TokenPositions) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys. Angles are float64, and the rotation is float32 or wider."""
        dim = self.options.dim or q.shape[-1]
        speed, factor = frequencies(self.options, dim, places.reach)
        dtype = torch.promote_types(q.dtype, torch.float32)
        turn = _turn(places.queries, speed, factor, dtype)
        other = turn if places.new_keys is places.queries else _turn(places.new_keys, speed, factor, dtype)
        return self._apply(q, turn), self._apply(k, other)

    def _apply(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate the first dimensions of x ``[B, H, L, D]`` and keep the others."""
        cos, sin = turn
        dim = self.options.dim or x.shape[-1]
        turning = x[..., :dim].to(cos.dtype)
        half = self.options.style == "half"
        a, b = turning.chunk(2, -1) if half else (turning[..., ::2], turning[..., 1::2])
        parts = a * cos - b * sin, b * cos + a * sin  # [B, H, L, dim/2]
        done = (torch.cat(parts, -1) if half else torch.stack(parts, -1).flatten(-2)).to(x.dtype)
        return done if dim == x.shape[-1] else torch.cat([done, x[..., dim:]], -1)

    def cost(self, head_dim: int, width: int) -> PositionCost:
        """Count, per pair of dimensions, an angle, its cosine and sine, four products and two sums."""
        pairs = (self.options.dim or head_dim) // 2
        return PositionCost(place=3 * pairs, rotated=6 * pairs)


def _turn(places: Tensor, speed: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``[1 or B, 1, L, dim/2]`` of the angles at places ``[1 or B, L]``."""
    angles = places[..., None] * speed
    cos, sin = angles.cos(), angles.sin()
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    return cos.to(dtype)[:, None], sin.to(dtype)[:, None]

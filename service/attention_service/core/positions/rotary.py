"""Rotary position embedding: rotated queries and keys, whose product depends on their distance."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_contract import positions as options
from attention_service.core.positions.base import POSITIONS, Inert, PositionCost
from attention_service.core.positions.frequencies import frequencies, outgrown_length
from attention_service.core.positions.token_positions import TokenPositions
from attention_service.core.problem import Widths
from attention_service.core.slices import on_gpu
from attention_service.core.tensors import side_by_side


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
        dim, dtype = self.options.dim or q.shape[-1], torch.promote_types(q.dtype, torch.float32)
        dynamic = outgrown_length(self.options) is not None
        speed, factor = frequencies(self.options, dim, places.reach if dynamic else places.queries)
        turn = _turn(places.queries, speed, factor, dtype)
        if places.new_keys is not places.queries:
            return self._apply(q, turn), self._apply(k, _turn(places.new_keys, speed, factor, dtype))
        together = side_by_side((q, k), 1) if on_gpu(q) and not _differentiated(q, k) else None
        if together is None:
            return self._apply(q, turn), self._apply(k, turn)
        heads = q.shape[1], k.shape[1]
        turned = self._apply(together, turn).split_with_sizes(heads, 1)
        return turned[0], turned[1]

    def _apply(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate the first dimensions of x ``[B, H, L, D]`` and keep the others."""
        cos, sin = turn
        dim = self.options.dim or x.shape[-1]
        if on_gpu(x) and not _differentiated(x):  # which converts as it computes, so that four operations are enough
            done = torch.empty_like(x)
            (a, b), (to_a, to_b) = self._pairs(x[..., :dim]), self._pairs(done[..., :dim])
            torch.addcmul(a * cos, b, sin, value=-1, out=to_a)
            torch.addcmul(b * cos, a, sin, out=to_b)
            if dim != x.shape[-1]:
                done[..., dim:] = x[..., dim:]
            return done
        a, b = self._pairs(x[..., :dim].to(cos.dtype))
        parts = a * cos - b * sin, b * cos + a * sin  # [B, H, L, dim/2]
        half = self.options.style == "half"
        done = (torch.cat(parts, -1) if half else torch.stack(parts, -1).flatten(-2)).to(x.dtype)
        return done if dim == x.shape[-1] else torch.cat([done, x[..., dim:]], -1)

    def _pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the second of each pair of dimensions that turn together."""
        if self.options.style == "half":
            half = x.shape[-1] // 2
            return x[..., :half], x[..., half:]
        return x[..., ::2], x[..., 1::2]

    def cost(self, head_dim: int, width: int) -> PositionCost:
        """Count, per pair of dimensions, an angle, its cosine and sine, four products and two sums."""
        pairs = (self.options.dim or head_dim) // 2
        return PositionCost(place=3 * pairs, rotated=6 * pairs)


def _differentiated(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _turn(places: Tensor, speed: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``[1 or B, 1, L, dim/2]`` of the angles at places ``[1 or B, L]``."""
    angles = (places[..., None] * speed)[:, None]
    if factor != 1:
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
    if dtype == angles.dtype or not on_gpu(angles):
        return angles.cos().to(dtype), angles.sin().to(dtype)
    cos, sin = (angles.new_empty(angles.shape, dtype=dtype) for _ in range(2))
    return torch.cos(angles, out=cos), torch.sin(angles, out=sin)

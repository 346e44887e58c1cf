"""A norm as a linear map, its scale held at that of one run: so the parts of a state add up behind it too.

A norm makes γ ⊙ (x − m·mean x) · s + β of a state x, where s, the scale, is a number that depends on x. γ, β and m (1
of a layer norm, 0 of an RMS norm) are found by probes, whatever the class of the norm; s of a state by what the norm
made of it. Source: Elhage et al. 2021, A mathematical framework for transformer circuits.
"""

from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor, nn

from attention_service.core.tensors import wide

_LARGE: Final = 1e3, 1e6
"""The size of the numbers of probes, beside which a norm's ε is nothing: of float32 and less, and of float64."""


@dataclass(frozen=True, eq=False)
class HeldNorm:
    """A norm without its scale."""

    gain: Tensor
    """γ ``[d]``"""
    bias: Tensor
    """β ``[d]``"""
    centers: bool
    """True if it takes the mean away."""

    @classmethod
    @torch.no_grad()
    def of(cls, module: nn.Module, like: Tensor) -> Self | None:
        """Probe a norm of states such as ``like [B, L, d]``; None for a module of another kind."""
        width = like.shape[-1]
        signs = torch.ones(width, dtype=like.dtype, device=like.device)
        signs[1::2] = -1
        large = _LARGE[like.dtype == torch.float64]
        probes = [torch.zeros_like(signs), large * torch.ones_like(signs), large * signs]
        try:
            zero, same, mixed = (wide(module(probe.expand(1, 1, width))[0, 0]) for probe in probes)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):  # it takes no states alone
            return None
        if mixed.shape != signs.shape:
            return None
        centers = bool((same - zero).norm() < 0.5 * (mixed - zero).norm())
        signs = wide(signs)
        along = signs - signs.mean() if centers else signs
        gain = (mixed - zero) * along.square().mean().sqrt() / along
        return cls(gain, zero, centers) if bool(gain.isfinite().all()) and bool(gain.any()) else None

    def scale(self, state: Tensor, normed: Tensor) -> Tensor:
        """The scale s ``[…, 1]`` by which the norm made ``normed`` of states ``[…, d]``."""
        along = self._direction(state)
        size = along.square().sum(-1, keepdim=True)
        return ((normed - self.bias) * along).sum(-1, keepdim=True) / size.where(size > 0, 1)  # a state of zeros

    def held(self, part: Tensor, scale: Tensor) -> Tensor:
        """The image of a part of a state, without the bias."""
        return self._direction(part) * scale

    def explains(self, state: Tensor, normed: Tensor, tolerance: float) -> bool:
        """True if the norm is of this form: it made ``normed`` of the states."""
        made = self.held(state, self.scale(state, normed)) + self.bias
        return bool((made - normed).norm() <= tolerance * normed.norm())

    def _direction(self, state: Tensor) -> Tensor:
        return (state - state.mean(-1, keepdim=True) if self.centers else state) * self.gain

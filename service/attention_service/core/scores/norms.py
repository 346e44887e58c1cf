"""Scores of products and norms: by distance, and by angle."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention_contract import spec
from attention_service.core import steps
from attention_service.core.groups import one_for_each_query_head
from attention_service.core.scores.base import SCORES, Product, ScoreCost, Sketches, Tensors
from attention_service.core.tape import BOOL, Sketch, Tape
from attention_service.core.types import Learned, Widths

SMALLEST_SIGMA = 1e-6
"""A learned bandwidth is taken for this where it is smaller, as one that is given may not be smaller."""


@SCORES.register(
    spec.Gaussian,
    formula="−‖q − k‖² / 2σ²",
    gradient="∂q_i = Σ_j ∂s_ij (k_j − q_i)/σ², ∂k_j = Σ_i ∂s_ij (q_i − k_j)/σ², ∂σ = Σ_ij ∂s_ij ‖q_i − k_j‖²/σ³",
    cost="O(n²·d)",
    source="Nadaraya 1964; Watson 1964 (with a softmax, their estimator with a Gaussian kernel)",
)
@dataclass(frozen=True)
class Gaussian(Product):
    """s = −‖q − k‖² / 2σ²."""

    options: spec.Gaussian

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """σ, where it is learned."""
        return {"score.sigma": Learned((widths.heads,), fill=1.0)} if self.options.sigma == "learned" else {}

    def factors(self, q: Tensor, k: Tensor, learned: Tensors) -> tuple[Tensor, Tensor, float]:
        """From (q, −‖q‖²/2, 1)/σ² and (k, 1, −‖k‖²/2), once both are moved so that the keys lie around zero.

        No distance changes by that, and less is lost where points are close together and far from zero.
        """
        centre = k.detach().nan_to_num(0, 0, 0).mean(2, keepdim=True) if k.shape[2] else 0
        around = one_for_each_query_head(centre, q.shape[1]) if isinstance(centre, Tensor) else centre
        q, k = q - around, k - centre
        q = torch.cat([q, _half_square(q), torch.ones_like(q[..., :1])], -1)
        k = torch.cat([k, torch.ones_like(k[..., :1]), _half_square(k)], -1)
        if self.options.sigma != "learned":
            return q, k, self.options.sigma**-2
        sigma = learned["score.sigma"].to(q.dtype).abs().clamp(min=SMALLEST_SIGMA)
        return q * sigma.view(-1, 1, 1) ** -2, k, 1.0

    def sketched_factors(self, tape: Tape, q: Sketch, k: Sketch, learned: Sketches) -> tuple[Sketch, Sketch, float]:
        """Moved, squared, summed and put side by side; σ on the queries where it is learned."""
        finite = steps.plain(tape, steps.like(k, tracked=False))
        centre = steps.reduced(tape, finite, (*k.dims[:2], 1, k.dims[3]))
        around = steps.for_each_head(tape, centre, q.dims[1])
        q, k = steps.add(tape, q, around, minus=True), steps.add(tape, k, centre, minus=True)
        q = steps.cat(tape, [q, _half_square_sketched(tape, q), _ones(tape, q)], 3)
        k = steps.cat(tape, [k, _ones(tape, k), _half_square_sketched(tape, k)], 3)
        if self.options.sigma != "learned":
            return q, k, self.options.sigma**-2
        sigma = steps.cast(tape, learned["score.sigma"], q.itemsize)
        factor = steps.view(tape, _inverse_square(tape, sigma), (sigma.dims[0], 1, 1))
        return steps.multiply(tape, q, factor), k, 1.0

    def cost(self, widths: Widths) -> ScoreCost:
        """The product of D + 2 columns, and σ; for a query 4·D, for a key 5·D: moved, squared, summed, (averaged)."""
        d, learned = widths.head_dim, self.options.sigma == "learned"
        return ScoreCost(
            2 * (d + 2), 1, pair_backward_flops=1, query_flops=4 * d, key_flops=5 * d,
            query_width=d + 2, key_width=d + 2, scaled=not learned and self.options.sigma != 1,
            query_kept=d + (d + 2) * learned, key_kept=d, key_back=3,
        )  # fmt: skip


@SCORES.register(
    spec.Cosine,
    formula="q·k / (‖q‖ ‖k‖) · scale, 0 for a zero vector",
    gradient="u = q/‖q‖, w = k/‖k‖: ∂q_i = Σ_j ∂s_ij scale (w_j − (u_i·w_j) u_i)/‖q_i‖, ∂k_j likewise, "
    "∂scale = Σ_ij ∂s_ij u_i·w_j",
    cost="O(n²·d)",
    source="Graves et al. 2014, eq. 6; a learned scale for each head: Liu et al. 2022, section 3.2",
)
@dataclass(frozen=True)
class Cosine(Product):
    """s = q·k / (‖q‖ ‖k‖) · scale."""

    options: spec.Cosine

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """The scale, where it is learned."""
        return {"score.scale": Learned((widths.heads,), fill=1.0)} if self.options.scale == "learned" else {}

    def factors(self, q: Tensor, k: Tensor, learned: Tensors) -> tuple[Tensor, Tensor, float]:
        """Both at length 1."""
        q, k = _unit(q), _unit(k)
        if self.options.scale != "learned":
            return q, k, self.options.scale
        return q * learned["score.scale"].to(q.dtype).view(-1, 1, 1), k, 1.0

    def sketched_factors(self, tape: Tape, q: Sketch, k: Sketch, learned: Sketches) -> tuple[Sketch, Sketch, float]:
        """Both at length 1, and the scale on the queries where it is learned."""
        q, k = _unit_sketched(tape, q), _unit_sketched(tape, k)
        if self.options.scale != "learned":
            return q, k, self.options.scale
        scale = steps.cast(tape, learned["score.scale"], q.itemsize)
        return steps.multiply(tape, q, steps.view(tape, scale, (scale.dims[0], 1, 1))), k, 1.0

    def cost(self, widths: Widths) -> ScoreCost:
        """The product and the scale; for a query or a key 3·D: squared, summed, divided."""
        d, scaled, learned = widths.head_dim, int(self.options.scale != 1), self.options.scale == "learned"
        return ScoreCost(
            2 * d, 1, pair_backward_flops=1, query_flops=3 * d, key_flops=3 * d,
            query_width=d, key_width=d, scaled=scaled > 0 and not learned,
            query_kept=d * (1 + learned), key_kept=d, key_back=2,
        )  # fmt: skip


def _half_square(x: Tensor) -> Tensor:
    """``[..., W]`` to ``[..., 1]``: −‖x‖²/2."""
    half: Tensor = x.square().sum(-1, keepdim=True) * -0.5
    return half


def _half_square_sketched(tape: Tape, x: Sketch) -> Sketch:
    return steps.scale(tape, steps.total(tape, steps.square(tape, x), (*x.dims[:3], 1)))


def _ones(tape: Tape, x: Sketch) -> Sketch:
    return steps.filled(tape, (*x.dims[:3], 1), x.itemsize)


def _inverse_square(tape: Tape, sigma: Sketch) -> Sketch:
    """|σ|, kept from being too small, to the power −2; each undone by two or three operations on the way back."""
    y = steps.like(sigma)
    tape.does(3 * sigma.bytes, 3 * sigma.bytes, 0, 3)

    def step() -> None:
        n = sigma.bytes
        tape.does(n, n)  # σ⁻³
        tape.does(n, n)
        tape.does(2 * n, n)
        tape.does(0, sigma.itemsize)  # not where it was kept from being smaller
        tape.does(n, sigma.size * BOOL)
        tape.does(n + sigma.size * BOOL + sigma.itemsize, n)
        tape.does(n, n)  # its sign
        tape.does(2 * n, n)
        tape.give(sigma, sigma.size)

    return tape.later(y, step) if y.tracked else y


def _unit_sketched(tape: Tape, x: Sketch) -> Sketch:
    """``_unit``: the length found, the zeros, the length again without them, its inverse, the product."""
    dims = (*x.dims[:3], 1)
    one = steps.reduced(tape, steps.like(x, tracked=False), dims, functions=1)
    zero = steps.plain(tape, one, itemsize=BOOL)
    filled = steps.hide(tape, x, zero)
    inverse = Sketch(dims, x.itemsize, tracked=x.tracked)
    tape.does(x.bytes, one.bytes, one.size)
    tape.does(2 * one.bytes, 2 * one.bytes, 0, 2)

    def step() -> None:
        n, mask = one.bytes, zero.bytes
        tape.does(n, n)  # the product by 1, and −∂·(1/length)²
        tape.does(n, n)
        tape.does(n, n)
        tape.does(2 * n, n)
        tape.does(x.bytes + n, x.bytes)  # x / length, zero where that is
        tape.does(n, mask)
        tape.does(x.bytes + mask, x.bytes)
        tape.does(n + x.bytes, x.bytes)
        tape.give(filled, x.size, x.lies)

    if inverse.tracked:
        tape.later(inverse, step)
    return steps.multiply(tape, x, steps.hide(tape, inverse, zero))


def _unit(x: Tensor) -> Tensor:
    """x/‖x‖; zero, with a gradient of zero, where x is."""
    zero = torch.linalg.vector_norm(x.detach(), dim=-1, keepdim=True) == 0
    # Filled before the length is found: its second derivative at zero is NaN.
    length = torch.linalg.vector_norm(x.masked_fill(zero, 1), dim=-1, keepdim=True)
    inverse: Tensor = (1 / length).masked_fill(zero, 0)
    return x * inverse

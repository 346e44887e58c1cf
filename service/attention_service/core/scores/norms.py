"""Scores by distance and by angle: Gaussian and cosine."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention_contract import spec
from attention_service.core.problem import Learned, Widths
from attention_service.core.scores.base import SCORES, Product, ScoreCost, Tensors
from attention_service.core.tensors import one_for_each_query_head

SMALLEST_SIGMA = 1e-6
"""Lower bound of a learned bandwidth; the spec accepts no smaller one."""


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
        """Return σ, if it is learned."""
        return {"score.sigma": Learned((widths.heads,), fill=1.0)} if self.options.sigma == "learned" else {}

    def factors(self, q: Tensor, k: Tensor, learned: Tensors) -> tuple[Tensor, Tensor, float]:
        """Return (q, −‖q‖²/2, 1) and (k, 1, −‖k‖²/2), with 1/σ² as a factor or on the queries.

        The mean of the keys is subtracted first. Distances stay the same, and rounding errors shrink if all points are
        close together and far from zero.
        """
        centre = k.detach().nan_to_num(0, 0, 0).mean(2, keepdim=True) if k.shape[2] else 0
        around = one_for_each_query_head(centre, q.shape[1]) if isinstance(centre, Tensor) else centre
        q, k = q - around, k - centre
        of_query = _half_square(q)
        # A query whose square overflows gets NaN: with −∞ it would look nowhere, and its output would be zero.
        of_query = of_query.masked_fill(of_query == -torch.inf, torch.nan)
        q = torch.cat([q, of_query, torch.ones_like(q[..., :1])], -1)
        k = torch.cat([k, torch.ones_like(k[..., :1]), _half_square(k)], -1)
        if self.options.sigma != "learned":
            return q, k, self.options.sigma**-2
        sigma = learned["score.sigma"].to(q.dtype).abs().clamp(min=SMALLEST_SIGMA)
        return q * sigma.view(-1, 1, 1) ** -2, k, 1.0

    def cost(self, widths: Widths) -> ScoreCost:
        """The product of D + 2 columns, and σ; 4·D for a query: subtract, square, sum; 5·D for a key, with the mean."""
        d = widths.head_dim
        return ScoreCost(2 * (d + 2), 1, pair_backward_flops=1, query_flops=4 * d, key_flops=5 * d)


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
        """Return the scale, if it is learned."""
        return {"score.scale": Learned((widths.heads,), fill=1.0)} if self.options.scale == "learned" else {}

    def factors(self, q: Tensor, k: Tensor, learned: Tensors) -> tuple[Tensor, Tensor, float]:
        """Return queries and keys of length 1, and the scale."""
        q, k = _unit(q), _unit(k)
        if self.options.scale != "learned":
            return q, k, self.options.scale
        return q * learned["score.scale"].to(q.dtype).view(-1, 1, 1), k, 1.0

    def cost(self, widths: Widths) -> ScoreCost:
        """The product and the scale; 3·D for each query and key: square, sum, divide."""
        d = widths.head_dim
        return ScoreCost(2 * d, 1, pair_backward_flops=1, query_flops=3 * d, key_flops=3 * d)


def _half_square(x: Tensor) -> Tensor:
    """``[..., W]`` to ``[..., 1]``: −‖x‖²/2."""
    half: Tensor = x.square().sum(-1, keepdim=True) * -0.5
    return half


def _unit(x: Tensor) -> Tensor:
    """Divide by the length; a zero vector stays zero, with a gradient of zero.

    The largest element is divided out first, so that no square over- or underflows. The result does not depend on it.
    """
    largest = x.detach().abs().amax(-1, keepdim=True)
    zero = largest == 0
    x = x / largest.masked_fill(zero, torch.inf)  # whose gradient is zero too
    # Fill zero vectors before the length is found: its second derivative at zero is NaN.
    length = torch.linalg.vector_norm(x.masked_fill(zero, 1), dim=-1, keepdim=True)
    unit: Tensor = x / length
    return unit

"""Dot product, scaled dot product and bilinear score."""

from dataclasses import dataclass

from torch import Tensor

from attention_contract import spec
from attention_service.core.problem import Learned, Widths
from attention_service.core.scores.base import SCORES, Product, ScoreCost, Tensors


@SCORES.register(
    spec.Dot,
    formula="q·k",
    gradient="∂q_i = Σ_j ∂s_ij k_j, ∂k_j = Σ_i ∂s_ij q_i",
    cost="O(n²·d)",
    source="Luong et al. 2015, eq. 8",
)
@dataclass(frozen=True)
class Dot(Product):
    """s = q·k."""

    options: spec.Dot
    plain = True
    bilinear = True

    def cost(self, widths: Widths) -> ScoreCost:
        """The product."""
        return ScoreCost(pair_products=2 * widths.head_dim)


@SCORES.register(
    spec.ScaledDot,
    formula="q·k · scale, scale = 1/√d by default",
    gradient="∂q_i = scale · Σ_j ∂s_ij k_j, ∂k_j = scale · Σ_i ∂s_ij q_i",
    cost="O(n²·d)",
    source="Vaswani et al. 2017, eq. 1",
)
@dataclass(frozen=True)
class ScaledDot(Product):
    """s = q·k · scale."""

    options: spec.ScaledDot
    plain = True
    bilinear = True

    def factors(self, q: Tensor, k: Tensor, learned: Tensors) -> tuple[Tensor, Tensor, float]:
        """Return q, k and the scale of the spec, by default 1/√D."""
        return q, k, float(q.shape[-1] ** -0.5) if self.options.scale is None else self.options.scale

    def cost(self, widths: Widths) -> ScoreCost:
        """The product, and the scale once for each pair."""
        scale = int(self.options.scale != 1)
        return ScoreCost(2 * widths.head_dim, scale, pair_backward_flops=scale)


@SCORES.register(
    spec.Bilinear,
    formula="qᵀ W k, W for each head",
    gradient="∂q_i = Σ_j ∂s_ij W k_j, ∂k_j = Σ_i ∂s_ij Wᵀ q_i, ∂W = Σ_ij ∂s_ij q_i k_jᵀ",
    cost="O(n²·d + n·d²)",
    source="Luong et al. 2015, eq. 8 (general)",
)
@dataclass(frozen=True)
class Bilinear(Product):
    """s = qᵀ W k."""

    options: spec.Bilinear
    two_widths = True
    bilinear = True

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """W."""
        return {"score.weight": Learned((widths.heads, widths.head_dim, widths.key_dim))}

    def factors(self, q: Tensor, k: Tensor, learned: Tensors) -> tuple[Tensor, Tensor, float]:
        """Return Wᵀq, k and 1."""
        return q @ learned["score.weight"].to(q.dtype), k, 1.0

    def cost(self, widths: Widths) -> ScoreCost:
        """The product of the queries with W, and that of the result with the keys."""
        d, e = widths.head_dim, widths.key_dim
        return ScoreCost(2 * e, query_products=2 * d * e)

"""The additive score: a hidden layer for each pair of query and key."""

from dataclasses import dataclass

from torch import Tensor

from attention_contract import spec
from attention_service.core.problem import Learned, Widths
from attention_service.core.scores.additive_sums import additive_scores
from attention_service.core.scores.base import SCORES, ScoreCost, Tensors
from attention_service.core.tensors import one_for_each_query_head


@SCORES.register(
    spec.Additive,
    formula="vᵀ tanh(W₁ q + W₂ k), W₁, W₂ and v for each head",
    gradient="t = tanh(W₁ q_i + W₂ k_j), g = ∂s_ij v ⊙ (1 − t²): ∂v = Σ ∂s_ij t, "
    "∂W₁ = Σ g q_iᵀ, ∂W₂ = Σ g k_jᵀ, ∂q_i = W₁ᵀ Σ_j g, ∂k_j = W₂ᵀ Σ_i g",
    cost="O(n²·hidden + n·hidden·d)",
    source="Bahdanau et al. 2015, appendix A.1.2",
)
@dataclass(frozen=True)
class Additive:
    """s = vᵀ tanh(W₁ q + W₂ k)."""

    options: spec.Additive
    two_widths = True

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """W₁, W₂ and v."""
        heads, hidden = widths.heads, self._hidden(widths.head_dim)
        return {
            "score.query_weight": Learned((heads, hidden, widths.head_dim)),
            "score.key_weight": Learned((heads, hidden, widths.key_dim)),
            "score.v": Learned((heads, hidden)),
        }

    def scores(self, q: Tensor, k: Tensor, learned: Tensors) -> Tensor:
        """Compute the scores in blocks, so that the hidden layer is never in memory as a whole."""
        into, of_keys, v = (learned[f"score.{name}"].to(q.dtype) for name in ("query_weight", "key_weight", "v"))
        return additive_scores(q @ into.mT, one_for_each_query_head(k, q.shape[1]) @ of_keys.mT, v)

    def cost(self, widths: Widths) -> ScoreCost:
        """For each pair: add and tanh, and the product with v.

        Backward: add and tanh again; 1 − t², times v, times ∂s, and its sums over keys and over queries; and the
        product that gives ∂v.
        """
        d, hidden = widths.head_dim, self._hidden(widths.head_dim)
        return ScoreCost(
            pair_products=2 * hidden,
            pair_flops=2 * hidden,
            pair_backward_products=2 * hidden,
            pair_backward_flops=8 * hidden,
            query_products=2 * hidden * d,
            key_products=2 * hidden * widths.key_dim,
            by_query_head=True,
            layer=hidden,
        )

    def _hidden(self, head_dim: int) -> int:
        return self.options.hidden or head_dim

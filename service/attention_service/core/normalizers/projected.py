"""Normalizers that give low scores weight zero: sparsemax and 1.5-entmax."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from attention_contract import spec
from attention_service.core.normalizers.base import NORMALIZERS, NOTHING, PairCost, Plain
from attention_service.core.normalizers.simplex import entmax15_roots, sparsemax


@NORMALIZERS.register(
    spec.Sparsemax,
    formula="w_j = max(s_j/T − τ, 0), τ such that Σ w = 1, T = temperature",
    gradient="∂s_j = (∂w_j − mean of ∂w over the support)/T in the support {w > 0}, 0 outside",
    cost="O(n² log n)",
    source="Martins & Astudillo 2016, eq. 3 and algorithm 1; gradient: eq. 14",
)
@dataclass(frozen=True)
class Sparsemax(Plain):
    """Euclidean projection of s / T onto the simplex."""

    options: spec.Sparsemax

    def weights(
        self, masked_scores: Tensor, lengths: Tensor | None = None, learned: Mapping[str, Tensor] = NOTHING
    ) -> Tensor:
        """Return max(s/T − τ, 0)."""
        return sparsemax(masked_scores.to(self.runs_in(masked_scores.dtype)), self.options.temperature)

    def cost(self, keys: int) -> PairCost:
        """Count nine operations and the sort; four for the gradient.

        Forward: maximum and subtract; ⌈log₂ K⌉ comparisons to sort; running sum, times the rank, plus 1, compare,
        count; subtract τ, maximum with 0. Backward: in the support?, select, sum, subtract.
        """
        return PairCost(9 + _levels(keys), 4)


@NORMALIZERS.register(
    spec.Entmax15,
    formula="w_j = max(s_j/(2T) − τ, 0)², τ such that Σ w = 1, T = temperature",
    gradient="∂s_j = r_j (∂w_j − Σ_k r_k ∂w_k / Σ_k r_k)/T, r = √w",
    cost="O(n² log n)",
    source="Peters et al. 2019, section 3.2",
)
@dataclass(frozen=True)
class Entmax15(Plain):
    """1.5-entmax of s / T, between softmax (α = 1) and sparsemax (α = 2)."""

    options: spec.Entmax15

    def weights(
        self, masked_scores: Tensor, lengths: Tensor | None = None, learned: Mapping[str, Tensor] = NOTHING
    ) -> Tensor:
        """Return max(s/2T − τ, 0)²."""
        x = masked_scores.to(self.runs_in(masked_scores.dtype))
        return entmax15_roots(x, self.options.temperature).square()

    def cost(self, keys: int) -> PairCost:
        """Count nineteen operations and the sort; nine for the gradient.

        Forward: maximum, subtract, halve; ⌈log₂ K⌉ comparisons to sort; two running sums and a square; two means;
        variance (multiply, subtract), τ (subtract, maximum with 0, root, subtract), compare, count; subtract τ, maximum
        with 0, square. Backward: the square's 2, then of its roots: in the support?, select, two sums, multiply,
        subtract, halve.
        """
        return PairCost(19 + _levels(keys), 9)


def _levels(keys: int) -> int:
    """Return ⌈log₂ K⌉, the comparisons per element of a sort of K elements."""
    return max(keys - 1, 0).bit_length()

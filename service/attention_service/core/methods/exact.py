"""Exact attention, by whichever kernel."""

from collections.abc import Iterator
from dataclasses import dataclass

from attention_contract import spec
from attention_service.core.methods.base import METHODS, Refusal
from attention_service.core.problem import Learned, Widths
from attention_service.core.stages import taps_of


@METHODS.register(
    spec.Exact,
    formula="o_i = Σ_j w_ij v_j over every key that the masks allow",
    gradient="∂v_j = Σ_i w_ij ∂o_i, ∂w_ij = ∂o_i·v_j",
    cost="O(n²·d)",
    source="Vaswani et al. 2017, eq. 1",
)
@dataclass(frozen=True)
class Exact:
    """Every query against every key."""

    options: spec.Exact

    def taps(self, spec: spec.AttentionSpec) -> tuple[str, ...]:
        """Return all taps that the normalizer has."""
        return taps_of(spec)

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Return no learned tensors."""
        return {}

    def refuses(self, spec: spec.AttentionSpec) -> Iterator[Refusal]:
        """Yield no refusals."""
        yield from ()

"""Cost of a Hopfield retrieval: one attention per step, in blocks of states.

A retrieval until convergence is counted with its maximum number of steps.
"""

from dataclasses import dataclass

from attention_contract.spec import AttentionSpec
from attention_service.core.blocks import rows_at_once
from attention_service.core.normalizers import NORMALIZERS
from attention_service.core.problem import Widths
from attention_service.core.scores import SCORES

_LSE_FLOPS = 4
"""For each pair, the log-sum-exp after the last step: maximum, subtract, exp, sum."""
_ENTROPY_FLOPS = 3
"""For each pair, the entropy of the last weights: log, product, sum."""


@dataclass(frozen=True)
class RetrievalSizes:
    """The sizes of one retrieval. Notation as in ``core.hopfield``; V is the width of an output projection."""

    batch: int
    heads: int
    states: int
    patterns: int
    width: int
    steps: int
    """At most."""
    itemsize: int
    spec: AttentionSpec
    """Spec of the attention that updates a state."""
    masked: bool = False
    association: bool = False
    """True if the weights are returned."""
    state_width: int | None = None
    """Input width of the projection of the states; None for no projection."""
    stored_width: int | None = None
    output_width: int | None = None
    """V."""
    merged: bool = False
    """True if the heads of states and patterns are merged into the last dimension."""
    threads: int = 0
    reply: str = "float32"
    """The dtype that is answered in."""

    @property
    def rows(self) -> int:
        """States of one block."""
        return min(self.states, rows_at_once(self.batch, self.heads, self.patterns))

    @property
    def pairs(self) -> int:
        """State-pattern pairs of all heads."""
        return self.batch * self.heads * self.states * self.patterns


def retrieval_flops(r: RetrievalSizes) -> int:
    """Every step, the energy after the last one, what is said of its weights, and the projections.

    Beside the attention, a step finds each state's largest weight, and takes 8·D for β, energy and change.
    """
    numbers = r.batch * r.heads * r.states * r.width
    score = SCORES.of(r.spec.score).cost(Widths(r.heads, r.heads, r.width, r.width))
    softmax = NORMALIZERS.of(r.spec.normalizer).cost(r.patterns).flops
    update = (score.pair_products + score.pair_flops + softmax + 2 * r.width + 1) * r.pairs + 8 * numbers
    last = (2 * r.width + _LSE_FLOPS + _ENTROPY_FLOPS) * r.pairs + 12 * numbers
    ground = 2 * r.batch * r.heads * r.patterns * r.width
    return r.steps * update + last + ground + _projecting_flops(r)


def _projecting_flops(r: RetrievalSizes) -> int:
    into = r.batch * r.heads * r.width * (r.states * (r.state_width or 0) + r.patterns * (r.stored_width or 0))
    return 2 * (into + r.batch * r.heads * r.states * r.width * (r.output_width or 0))

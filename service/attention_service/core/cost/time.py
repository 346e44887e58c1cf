"""How long a pass should take: the arithmetic or the memory traffic, whichever is slower, and the cost of starting it.

Source: Williams et al. 2009, the roofline model.
"""

import operator
from dataclasses import dataclass, replace

from attention_contract.schemas.complexity import StageFlops
from attention_service.core.cost.encoding import token_traffic
from attention_service.core.cost.flops import backward_flops, flops
from attention_service.core.cost.held import Held
from attention_service.core.cost.memory import PAIR_TAPS
from attention_service.core.cost.pairs import (
    fused_masks,
    masks_of,
    normalizer_cost,
    plainly_causal,
    score_itemsize,
    softmax_itemsize,
)
from attention_service.core.cost.tensors import parameter_count
from attention_service.core.cost.workload import Workload
from attention_service.core.positions import POSITIONS


@dataclass(frozen=True)
class Rates:
    """What a device does, as measured on it."""

    flops_per_s: float
    """Floating-point operations a second in a large matrix product."""
    bytes_per_s: float
    """Bytes read and written a second in a large copy."""
    overhead_s: float
    """Seconds to start one attention, however small."""

    def seconds(self, flops: float, moved: int, kernel: str) -> float:
        """Arithmetic and traffic, and the start: side by side in a fused kernel, one after the other in stages."""
        together = max if kernel == "fused" else operator.add
        return float(together(flops / self.flops_per_s, moved / self.bytes_per_s)) + self.overhead_s


def predicted_seconds(work: Workload, kernel: str, rates: Rates) -> float:
    """Seconds of one forward pass with this kernel, the taps that are computed again included."""
    again = 2 * _pairs_again(work) * work.head_dim if kernel == "fused" else 0
    executed = _executed(flops(work, masked=False), work, kernel) + again
    return rates.seconds(executed, moved_bytes(work, kernel), kernel)


def predicted_gradient_seconds(work: Workload, kernel: str, rates: Rates) -> float:
    """Seconds of one forward and one backward pass with this kernel.

    The backward pass moves about twice what the forward pass does: what was kept, and a gradient for each.
    """
    stages = backward_flops(work, masked=False, fused=kernel == "fused")
    moved = 2 * moved_bytes(replace(work, taps=frozenset({"output"})), kernel)
    return predicted_seconds(work, kernel, rates) + rates.seconds(_executed(stages, work, kernel), moved, kernel)


def moved_bytes(work: Workload, kernel: str) -> int:
    """Bytes that one forward pass reads and writes: every tensor when it is made and each time that it is used."""
    held = Held.of(work)
    parameters = parameter_count(work) * work.itemsize
    moved = held.inputs + parameters + held.made + held.q + held.kv + 2 * held.context + held.output
    moved += token_traffic(work)
    if kernel != "fused":
        return moved + _stage_traffic(work, work.pairs * work.heads)
    # The kernel's mask: made, read, written as floats, and read again.
    moved += fused_masks(work).combined * (2 + 2 * work.itemsize)
    return moved + _stage_traffic(work, _pairs_again(work))


def _executed(stages: StageFlops, work: Workload, kernel: str) -> float:
    """FLOPs that the kernel does: every pair, but for the fused one's causal path, which ends at the diagonal."""
    if kernel != "fused" or not plainly_causal(work):
        return stages.total
    square = min(work.queries, work.keys)
    allowed = square * (square + 1) // 2 + (work.queries - square) * work.keys
    attention = stages.scores + stages.normalizer + stages.values
    return stages.total - attention + attention * (allowed / max(work.queries * work.keys, 1))


def _pairs_again(work: Workload) -> int:
    """Pairs for which a fused kernel's scores are computed again, for the taps."""
    if not work.taps & PAIR_TAPS:
        return 0
    heads = work.heads if work.selected_heads is None else work.selected_heads
    queries = work.queries if work.selected_queries is None else work.selected_queries
    return work.batch * heads * queries * work.keys


def _stage_traffic(work: Workload, pairs: int) -> int:
    """Bytes moved by the stages over this many pairs, each of which reads what the one before it wrote."""
    c, n = score_itemsize(work), softmax_itemsize(work)
    scores = 1 + (6 if work.spec.softcap is not None else 0) + (2 if masks_of(work).any else 0)
    scores += 4 if POSITIONS.of(work.spec.position).biased else 0  # made, read and added
    # What the normalizer moves; then the weights, written in the dtype of the values where that is another, and read
    # for their sum.
    narrowed = work.itemsize if n == work.itemsize else n + 2 * work.itemsize
    return pairs * (scores * c + normalizer_cost(work).moved + narrowed)

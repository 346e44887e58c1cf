"""Cost that a returned tap adds to a request."""

from dataclasses import replace

from attention_contract.schemas.counts import TapCost
from attention_service.cost.approximate import approximated
from attention_service.cost.clock import Clock
from attention_service.cost.encoding import position_cost
from attention_service.cost.kernels import kernel_of
from attention_service.cost.memory import peak_bytes
from attention_service.cost.pairs import PAIR_TAPS, masks_of, normalizer_cost, score_cost
from attention_service.cost.tensor_bytes import tap_elements
from attention_service.cost.time import moved_bytes
from attention_service.cost.workload import Workload

_ORDER = ("scores", "capped_scores", "masked_scores", "lse", "weights")


def tap_costs(work: Workload, kernel: str, clock: Clock) -> dict[str, TapCost]:
    """Return the cost of every tap but the output, each beside all others that are returned."""
    return {tap: _added(work, frozenset({tap}), kernel, clock) for tap in sorted(work.taps - {"output"})}


def taps_cost(work: Workload, kernel: str, clock: Clock) -> TapCost | None:
    """Return the cost of all taps together; None if there are none."""
    taps = work.taps - {"output"}
    return _added(work, taps, kernel, clock) if taps else None


def _added(work: Workload, taps: frozenset[str], kernel: str, clock: Clock) -> TapCost:
    """Return the cost that these taps add to the same workload without them."""
    without = replace(work, taps=work.taps - taps)
    return TapCost(
        flops=tap_flops(work, kernel) - tap_flops(without, kernel),
        bytes_moved=moved_bytes(work, kernel) - moved_bytes(without, kernel),
        peak_bytes=peak_bytes(work, kernel) - peak_bytes(without, kernel),
        output_bytes=sum(tap_elements(work, tap) for tap in taps) * work.itemsize,
        predicted_ms=(clock.forward(work, kernel).median - clock.forward(without, kernel).median) * 1e3,
    )


def tap_flops(work: Workload, kernel: str) -> int:
    """FLOPs of the stages that are recomputed for the taps that a kernel does not keep.

    For each pair of the selected heads and queries: the score's, the softcap's 3, 1 for masks, the bias's, and the
    normalizer's, of which the log-sum-exp needs all but the division; each only as far as the last tap needs.
    """
    missing = work.taps & PAIR_TAPS - kernel_of(work, kernel).keeps
    if approximated(work) is not None or not missing:
        return 0
    last = max(_ORDER.index(tap) for tap in missing)
    score = score_cost(work)
    each = score.pair_products + score.pair_flops
    if last >= 1 and work.spec.softcap is not None:
        each += 3
    if last >= 2:
        each += masks_of(work).any + position_cost(work).pair
    if last >= 3:
        each += (work.spec.normalizer.temperature != 1) + normalizer_cost(work).flops - (last == 3)
    heads = work.heads if work.selected_heads is None else work.selected_heads
    queries = work.queries if work.selected_queries is None else work.selected_queries
    read_by = heads if score.by_query_head else min(heads, work.kv_heads)
    tokens = heads * queries * (score.query_products + score.query_flops)
    tokens += read_by * work.keys * (score.key_products + score.key_flops)
    return work.batch * (heads * queries * work.keys * each + tokens)

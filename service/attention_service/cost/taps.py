"""Cost that a returned tap adds to a request."""

from dataclasses import replace

from attention_contract.schemas.counts import TapCost
from attention_service.cost.clock import Clock
from attention_service.cost.flops import tap_flops
from attention_service.cost.memory import peak_bytes
from attention_service.cost.tensor_bytes import tap_elements
from attention_service.cost.time import moved_bytes
from attention_service.cost.workload import Workload


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

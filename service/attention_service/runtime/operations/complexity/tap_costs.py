"""Cost that a returned tap adds to a request."""

from attention_contract.schemas.counts import TapCost
from attention_service.cost.flops import tap_flops
from attention_service.cost.tensor_bytes import tap_elements
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.operations.complexity.subjects import Subject


def tap_costs(subject: Subject, bound: BoundRequest, kernel: str) -> dict[str, TapCost]:
    """Return the cost of every tap but the output, each beside all others that are returned."""
    return {tap: _added(subject, bound, frozenset({tap}), kernel) for tap in sorted(subject.taps - {"output"})}


def taps_cost(subject: Subject, bound: BoundRequest, kernel: str) -> TapCost | None:
    """Return the cost of all taps together; None if there are none."""
    taps = subject.taps - {"output"}
    return _added(subject, bound, taps, kernel) if taps else None


def _added(subject: Subject, bound: BoundRequest, taps: frozenset[str], kernel: str) -> TapCost:
    """Return the cost that these taps add to the same request without them."""
    all_taps, others = subject.taps, subject.taps - taps
    found, without = (subject.forward(bound, kernel, each) for each in (all_taps, others))
    times = [subject.time(each, bound, kernel).median for each in (found, without)]
    return TapCost(
        flops=tap_flops(bound, all_taps, kernel) - tap_flops(bound, others, kernel),
        bytes_moved=found.total().moved - without.total().moved,
        peak_bytes=found.peak_bytes - without.peak_bytes,
        output_bytes=sum(tap_elements(bound, tap) for tap in taps) * bound.itemsize,
        predicted_ms=(times[0] - times[1]) * 1e3,
    )

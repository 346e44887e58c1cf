"""Roofline time of a pass: the slower of arithmetic and memory traffic, and the cost of starting it.

Source: Williams et al. 2009, the roofline model.
"""

from dataclasses import dataclass, replace

from attention_contract.schemas.complexity import StageFlops
from attention_service.core.kernels import Kernel
from attention_service.core.kernels.materialized import MATERIALIZED
from attention_service.core.masks.operation_count import mask_cost
from attention_service.cost.approximate import approximated, exactly, method_cost
from attention_service.cost.flops import backward_flops, flops, tap_flops
from attention_service.cost.kernels import kernel_of
from attention_service.cost.retrieval import Retrieval, retrieval_flops
from attention_service.cost.traffic import gradient_traffic, traffic
from attention_service.cost.workload import Workload

_STARTS = 2.5, 1.0
_BACKWARD_STARTS = 8.0, 3.0
"""Constant cost of a block of queries, and of a step of a method, in starts of an attention; measured."""
_OPERATIONS = 8.0
"""Small operations that take as long as a start; masks with fewer add nothing."""
_STEP_MOVED = 20
"""Elements for each pair whose traffic takes as long as finding the largest weight of a step, as measured on a CPU."""
_LAST_MOVED = 50
"""The same for the last energy and the entropy, whose logarithms and exponentials take longer than their traffic."""


@dataclass(frozen=True)
class Rates:
    """Rates of a device, as measured on it."""

    flops_per_s: float
    """Floating-point operations a second in a large matrix product."""
    bytes_per_s: float
    """Bytes read and written a second in a large copy."""
    overhead_s: float
    """Seconds to start one attention, however small."""
    link_bytes_per_s: float | None = None
    """Bytes a second between the host and a device with memory of its own; None if they share memory."""
    half_flops_per_s: float | None = None
    """Floating-point operations a second in a product of half types, which may be a fiftieth of those of float32 on a
    CPU; None if it is not measured."""

    def seconds(self, flops: float, moved: float, kernel: Kernel, starts: float = 1) -> float:
        """Return the time of arithmetic, traffic and starts, by a kernel."""
        computing, moving = flops / self.flops_per_s, moved * kernel.traffic / self.bytes_per_s
        return (max(computing, moving) if kernel.overlaps else computing + moving) + starts * self.overhead_s


def predicted_seconds(work: Workload, kernel: str, rates: Rates) -> float:
    """Seconds of one forward pass with this kernel, with the taps that are recomputed."""
    if work.reported:  # exact attention, block by block, and the weights that the approximation amounts to
        compared = predicted_seconds(exactly(work), MATERIALIZED, rates)
        return predicted_seconds(replace(work, reported=False), kernel, rates) + 2 * compared
    if work.compared:  # once more, from the same queries, keys and values
        both = (predicted_seconds(each, kernel, rates) for each in (replace(work, compared=False), work.unedited))
        return sum(both) - flops(work, masked=False).projections / rates.flops_per_s
    executed = _executed(flops(work, masked=False), work, kernel) + tap_flops(work, kernel)
    return rates.seconds(
        executed, moved_bytes(work, kernel), kernel_of(work, kernel), 1 + _starts(work, kernel, _STARTS)
    )


def predicted_gradient_seconds(work: Workload, kernel: str, rates: Rates) -> float:
    """Seconds of one forward and one backward pass with this kernel."""
    stages = backward_flops(work, masked=False, fused=kernel_of(work, kernel).recomputes)
    moved = gradient_traffic(work, kernel).moved
    starts = 1 + _starts(work, kernel, _BACKWARD_STARTS)
    return predicted_seconds(work, kernel, rates) + rates.seconds(
        _executed(stages, work, kernel), moved, kernel_of(work, kernel), starts
    )


def predicted_retrieval_seconds(r: Retrieval, rates: Rates) -> float:
    """Seconds of every step that it may take, block by block."""
    blocks = -(-r.states // max(r.rows, 1))
    update = replace(r.work(r.states), inputs=frozenset({"query", "key", "value"}))
    moved = r.steps * moved_bytes(update, MATERIALIZED)
    moved += (r.steps * _STEP_MOVED + _LAST_MOVED) * r.pairs * r.itemsize
    arithmetic = retrieval_flops(r) / rates.flops_per_s + moved / rates.bytes_per_s
    starts = 2 * blocks * (r.steps + 1) + 1  # an attention, and the work on states around it
    return arithmetic + starts * rates.overhead_s


def moved_bytes(work: Workload, kernel: str) -> int:
    """Bytes that one forward pass reads and writes: every tensor once when it is written and at each use."""
    return traffic(work, kernel).moved


def executed_share(work: Workload, kernel: str) -> float:
    """Return the share of all pairs that a kernel computes."""
    return kernel_of(work, kernel).executed(work).pairs / work.pairs if work.pairs else 1.0


def executed_flops(work: Workload, kernel: str) -> int:
    """FLOPs of one forward pass with this kernel: every pair, except the skipped ones."""
    return _executed(flops(work, masked=False), work, kernel)


def executed_backward_flops(work: Workload, kernel: str) -> int:
    """FLOPs of one backward pass with this kernel, with recomputation."""
    return _executed(backward_flops(work, masked=False, fused=kernel_of(work, kernel).recomputes), work, kernel)


def _executed(stages: StageFlops, work: Workload, kernel: str) -> int:
    """FLOPs that the kernel executes."""
    attention = stages.scores + stages.normalizer + stages.values
    share = executed_share(work, kernel)
    return stages.total if share == 1 else stages.total - attention + round(attention * share)


def _starts(work: Workload, kernel: str, each: tuple[float, float]) -> float:
    """Number of starts: for each block of queries, or each step of a method.

    Masks of many operations add starts each time that they are laid out.
    """
    if approximated(work) is not None:
        return each[1] * method_cost(work).steps
    laying = max(mask_cost(work.spec.masks) / _OPERATIONS - 1, 0.0)
    blocks = kernel_of(work, kernel).executed(work).blocks
    return (each[0] + laying) * blocks if blocks else laying

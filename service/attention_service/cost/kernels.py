"""The kernel of a workload, for the facts that it states of itself."""

from attention_service.core.kernels import KERNELS, Kernel
from attention_service.core.kernels.materialized import Materialized
from attention_service.cost.approximate import approximated
from attention_service.cost.attention import SizedAttention
from attention_service.cost.clock import Rates
from attention_service.cost.pairs import fused_mask_elements


def kernel_of(x: SizedAttention, name: str) -> Kernel:
    """Return the kernel of this name; for a method that approximates, its own arithmetic.

    Raises KeyError for a name that is not registered.
    """
    return KERNELS[name].make() if approximated(x) is None else _OWN


class _OwnArithmetic(Materialized):
    """A method that approximates: its costs are its own, and no kernel computes it."""

    keeps = frozenset()
    recomputes = True


_OWN = _OwnArithmetic()


_FEW_QUERIES, _BACKWARD, _STAGES = 8, 3.5, 10
"""Queries below which gradients in half types take stages; products of both passes beside those of the first;
operations of the stages."""


def rank_seconds(x: SizedAttention, name: str, rates: Rates, *, backward: bool) -> float:
    """Seconds by which kernels are ranked before one is rehearsed: a roofline of what each states of itself.

    On 447 random requests the chosen kernel took 1.025 times as long as the best on average, and 1.13 times at the 95th
    percentile. Rehearsals of all kernels reached 1.095 and 1.66, and take three times as long.
    """
    kernel = kernel_of(x, name)
    if backward and x.itemsize == 2 and x.queries < _FEW_QUERIES and kernel.holds == "pairs":
        return 0.0  # a fused kernel converts all keys and values for a few queries
    done, ways = kernel.executed(x), 2 if backward else 1
    pairs, itemsize = done.pairs * x.heads, max(x.itemsize, 4)
    fused, widest = kernel.holds == "masks", max(x.head_dim, x.value_dim)
    widths = 2 * widest if fused else x.head_dim + x.value_dim  # narrow ones are padded
    computing = 2 * pairs * widths * (_BACKWARD if backward else 1)
    computing += rates.function_flops * pairs * ways
    operations: float = _STAGES * (3 if backward else 1)
    match kernel.holds:
        case "pairs":  # every stage goes over all scores
            moved, operations = _STAGES * pairs * itemsize * ways, operations + 6
        case "masks":  # one that is not plainly causal is laid out
            moved = 3 * fused_mask_elements(x) * itemsize
            if x.head_dim != x.value_dim:
                tokens = x.batch * (x.heads * x.queries + 2 * x.kv_heads * x.keys)
                moved += 3 * tokens * widest * itemsize
        case _:
            moved = 8 * pairs * itemsize * ways
            operations += (20 + 16 * done.blocks) * (2.5 if backward else 1)
    moving = moved / (rates.reached * rates.bytes_per_s)
    rate = rates.product_flops_per_s(x.itemsize) if rates.overlaps else rates.flops_per_s  # a GPU's, or a CPU's
    return computing / rate + moving + operations * rates.operation * rates.overhead_s

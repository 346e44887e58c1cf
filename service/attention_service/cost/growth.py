"""Growth of the cost along a sweep: between its two largest values, and in the limit."""

from collections.abc import Sequence
from math import log

from attention_contract.schemas.complexity import Growth
from attention_contract.spec import Entmax15, Sparsemax
from attention_service.core.masks.rules import pattern_of
from attention_service.cost.approximate import approximated, method_order
from attention_service.cost.clock import Clock
from attention_service.cost.complexity_symbols import explained
from attention_service.cost.kernels import kernel_of
from attention_service.cost.memory import makes_pairs, peak_bytes
from attention_service.cost.time import executed_flops
from attention_service.cost.workload import Workload

# The letters are those of ``letters``.
_PAIRS = {"length": "n²", "batch": "b·m·n", "past": "m·p"}
_TOKENS = {"length": "n", "batch": "b·(m + n)", "queries": "m", "keys": "n", "past": "p"}


def _pairs(dimension: str) -> str:
    return _PAIRS.get(dimension, "m·n")


def _tokens(dimension: str) -> str:
    return _TOKENS.get(dimension, "(m + n)")


_SKIPPED = frozenset({"g", "r"})
"""Strips beside which whole tiles are skipped."""


def growth(work: Workload, dimension: str, values: Sequence[int], kernel: str, clock: Clock) -> Growth:
    """Return the exponents between the two largest values of a sweep, and the asymptotic forms.

    FLOPs are those that the kernel does in a forward pass, bytes the kernel's peak with the taps of the workload, the
    time the median that the clock predicts. A size of 0 has no logarithm and is left out; with one that is left, it is
    compared with its double. Nor has a cost of 0: where masks forbid everything, there is no exponent.
    """
    sizes = sorted({value for value in values if value > 0}) or [work.value(dimension) or 1]
    if len(sizes) == 1:
        sizes.append(2 * sizes[0])
    (small, before), (large, after) = ((size, work.at(dimension, size)) for size in sizes[-2:])
    step = log(large) - log(small)

    def exponent(less: float, more: float) -> float | None:
        return log(more / less) / step if less > 0 and more > 0 else None

    time, memory = time_order(work, dimension, kernel), memory_order(work, dimension, kernel)
    method = approximated(work)
    return Growth(
        dimension=dimension,
        between=(small, large),
        flops_exponent=exponent(executed_flops(before, kernel), executed_flops(after, kernel)),
        time_exponent=exponent(clock.forward(before, kernel).median, clock.forward(after, kernel).median),
        peak_bytes_exponent=exponent(peak_bytes(before, kernel), peak_bytes(after, kernel)),
        time_order=time,
        memory_order=memory,
        letters=explained(f"{time} {memory}", {} if method is None else method.letters()),
    )


def time_order(work: Workload, dimension: str = "length", kernel: str = "fused") -> str:
    """Return the order of the kernel's work, such as ``O(n²·d)``.

    That is over every pair, or up to half of them, unless the masks leave a query a band of keys, and strips besides,
    and the kernel is the blocked one; beside another, the form over the allowed pairs alone is added. Of strips that
    come back after every stride each tile is touched.
    """
    if approximated(work) is not None:
        return method_order(work, dimension, memory=False)
    projections = f" + {_tokens(dimension)}·d²" if work.sizes is not None and dimension != "past" else ""
    sorting = isinstance(work.spec.normalizer, Sparsemax | Entmax15)
    width = f"(d + h·log {'p' if dimension == 'past' else 'n'})" if sorting else "d"
    order = f"O({_pairs(dimension)}·{width}{projections})"
    bounds = pattern_of(work.spec.masks, work.queries, work.sequence_keys, work.past).bounds
    if dimension == "length" and bounds.left and bounds.right:
        band = f"n·({' + '.join(['w', *sorted(bounds.strips)])})" if bounds.strips else "n·w"
        sparse = f"O({band}·{width}{projections})"
        return (
            sparse
            if kernel_of(work, kernel).holds == "tiles" and bounds.strips <= _SKIPPED
            else f"{order}; over allowed pairs alone {sparse}"
        )
    return order


def memory_order(work: Workload, dimension: str, kernel: str) -> str:
    """Return the order of the peak beyond the parameters, such as ``O(n·d)`` with the request's masks and taps."""
    if approximated(work) is not None:
        return method_order(work, dimension, memory=True)
    by_head, shared = makes_pairs(work, kernel)
    pairs = f"h·{_pairs(dimension)} + " if by_head else f"{_pairs(dimension)} + " if shared else ""
    return f"O({pairs}{_tokens(dimension)}·d)"

"""Growth of the cost along a sweep: between its two largest values, and in the limit."""

import re
from collections.abc import Callable, Mapping, Sequence
from math import log
from typing import Final

from attention_contract.schemas.costs.complexity import Growth
from attention_contract.spec import Entmax15, Sparsemax
from attention_service.core.masks.rules import pattern_of
from attention_service.cost.approximate import approximated, method_order
from attention_service.cost.flops import executed_flops
from attention_service.cost.kernels import kernel_of
from attention_service.cost.pairs import PAIR_TAPS, fused_mask_elements, mask_elements
from attention_service.cost.rehearsal import Seen
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.operations.complexity.subjects import Subject
from attention_service.runtime.operations.complexity.valid_sizes import at, value_of

# The letters are those of ``letters``.
_PAIRS = {"length": "n²", "batch": "b·m·n", "past": "m·p"}
_TOKEN_COUNTS = {"length": "n", "batch": "b·(m + n)", "queries": "m", "keys": "n", "past": "p"}


def _pairs(dimension: str) -> str:
    return _PAIRS.get(dimension, "m·n")


def _tokens(dimension: str) -> str:
    return _TOKEN_COUNTS.get(dimension, "(m + n)")


_SKIPPED = frozenset({"g", "r"})
"""Strips beside which whole tiles are skipped."""


def growth(subject: Subject, dimension: str, values: Sequence[int], kernel: str) -> Growth:
    """Return the exponents between the two largest values of a sweep, and the asymptotic forms.

    FLOPs are those that the kernel does in a forward pass, bytes the kernel's peak with the taps of the request, the
    time the median that the clock predicts. A size of 0 has no logarithm and is left out; with one that is left, it is
    compared with its double. Nor has a cost of 0: where masks forbid everything, there is no exponent.
    """
    base = subject.base
    sizes = sorted({value for value in values if value > 0}) or [value_of(base, dimension) or 1]
    if len(sizes) == 1:
        sizes.append(2 * sizes[0])
    small, large = sizes[-2:]
    step = log(large) - log(small)
    ends = [
        (bound, subject.forward(bound, kernel, subject.taps))
        for bound in (at(base, dimension, size) for size in (small, large))
    ]

    def exponent(number: Callable[[BoundRequest, Seen], float]) -> float | None:
        less, more = (number(*end) for end in ends)
        return log(more / less) / step if less > 0 and more > 0 else None

    time, memory = time_order(base, dimension, kernel), memory_order(base, subject.taps, dimension, kernel)
    method = approximated(base)
    return Growth(
        dimension=dimension,
        between=(small, large),
        flops_exponent=exponent(lambda bound, _: executed_flops(bound, kernel)),
        time_exponent=exponent(lambda bound, rehearsal: subject.time(rehearsal, bound, kernel).median),
        peak_bytes_exponent=exponent(lambda _, rehearsal: rehearsal.peak_bytes),
        time_order=time,
        memory_order=memory,
        letters=explained(f"{time} {memory}", {} if method is None else method.letters()),
    )


def time_order(bound: BoundRequest, dimension: str = "length", kernel: str = "fused") -> str:
    """Return the order of the kernel's work, such as ``O(n²·d)``.

    That is over every pair, or up to half of them, unless the masks leave a query a band of keys, and strips besides,
    and the kernel is the blocked one; beside another, the form over the allowed pairs alone is added. Of strips that
    come back after every stride each tile is touched.
    """
    if approximated(bound) is not None:
        return method_order(bound, dimension, memory=False)
    projections = f" + {_tokens(dimension)}·d²" if bound.sizes is not None and dimension != "past" else ""
    sorting = isinstance(bound.spec.normalizer, Sparsemax | Entmax15)
    width = f"(d + h·log {'p' if dimension == 'past' else 'n'})" if sorting else "d"
    order = f"O({_pairs(dimension)}·{width}{projections})"
    bounds = pattern_of(bound.spec.masks, bound.queries, bound.sequence_keys, bound.past).bounds
    if dimension == "length" and bounds.left and bounds.right:
        band = f"n·({' + '.join(['w', *sorted(bounds.strips)])})" if bounds.strips else "n·w"
        sparse = f"O({band}·{width}{projections})"
        return (
            sparse
            if kernel_of(bound, kernel).holds == "tiles" and bounds.strips <= _SKIPPED
            else f"{order}; over allowed pairs alone {sparse}"
        )
    return order


def memory_order(bound: BoundRequest, taps: frozenset[str], dimension: str, kernel: str) -> str:
    """Return the order of the peak beyond the parameters, such as ``O(n·d)`` with the request's masks and taps."""
    if approximated(bound) is not None:
        return method_order(bound, dimension, memory=True)
    by_head, shared = _makes_pairs(bound, taps, kernel)
    pairs = f"h·{_pairs(dimension)} + " if by_head else f"{_pairs(dimension)} + " if shared else ""
    return f"O({pairs}{_tokens(dimension)}·d)"


def _makes_pairs(bound: BoundRequest, taps: frozenset[str], kernel: str) -> tuple[bool, bool]:
    """Return two flags: the request holds tensors over all pairs for each head, and tensors that heads share."""
    facts = kernel_of(bound, kernel)
    again = bool(taps & PAIR_TAPS - facts.keeps)
    if facts.holds == "tiles":
        return again, False
    laid_out = fused_mask_elements(bound) if facts.holds == "masks" else mask_elements(bound)
    return facts.holds == "pairs" or again, laid_out > 0


LETTERS: Final[Mapping[str, str]] = {
    "n": "keys; also queries if both lengths vary",
    "m": "queries",
    "p": "past keys",
    "b": "sequences in the batch",
    "d": "width of all heads together",
    "h": "heads",
    "w": "adjacent keys that the masks leave a query",
    "g": "global tokens, or the prefix length",
    "r": "keys in a query's random blocks",
    "s": "distance between stripes or summaries, in keys",
    "c": "keys in a summary",
}
"""Letters of exact attention. A method can give a letter another meaning: see ``Approximation.letters``."""
_LETTER: Final = re.compile(r"(?<![a-zA-Z])[a-z](?![a-zA-Z])")


def explained(orders: str, own: Mapping[str, str]) -> dict[str, str]:
    """Explain each letter in some orders; ``own`` gives the letters that a method defines."""
    known = {**LETTERS, **own}
    return {letter: known[letter] for letter in dict.fromkeys(_LETTER.findall(orders))}

"""The work of one pass as terms whose rates can be measured: the summands of a clock by curves.

Terms name registered entries by their names, so that a new entry has terms of its own; its rates are guessed from the
device's until they are measured.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from attention_service.core.blocks import rows_at_once
from attention_service.core.kernels.materialized import MATERIALIZED
from attention_service.cost.approximate import approximated, exactly, method_cost
from attention_service.cost.flops import SECOND_PASSES
from attention_service.cost.kernels import kernel_of
from attention_service.cost.retrieval import Retrieval
from attention_service.cost.tensor_bytes import tap_elements
from attention_service.cost.terms.base import Term, backward, elements, lg, moved, over_pairs, start
from attention_service.cost.terms.carrying import FORMS, Form, reading_terms, transfer_terms, writing_terms
from attention_service.cost.terms.common_terms import around, around_backward, factors, taps
from attention_service.cost.terms.kernel_terms import again, of_kernel, stages
from attention_service.cost.terms.plain import is_plain
from attention_service.cost.traffic import own_traffic
from attention_service.cost.workload import Workload

_NOT_KEPT = 25
"""Logarithm to base 2: memory of more than 32 MiB returns to the system when it is freed (glibc's
``DEFAULT_MMAP_THRESHOLD_MAX``), and is cleared page by page at the next allocation."""

__all__ = [
    "FORMS",
    "Form",
    "Term",
    "forward_terms",
    "gradient_terms",
    "inspection_terms",
    "reading_terms",
    "retrieval_terms",
    "transfer_terms",
    "writing_terms",
]


@lru_cache(maxsize=1024)
def forward_terms(work: Workload, kernel: str) -> list[Term]:
    """Return the terms of one forward pass with this kernel, or by the method, with recomputed taps."""
    return _told(_forward(work, kernel))


def gradient_terms(work: Workload, kernel: str, *, twice: bool = False, checks: int = 0) -> list[Term]:
    """Return the terms of a forward and a backward pass.

    ``twice`` adds the gradients of gradients, ``checks`` this many forward passes in float64.
    """
    bare = replace(work, taps=frozenset({"output"}), selected_heads=None, selected_queries=None)
    back = [start("gradients"), *around_backward(bare), *backward(_core(bare, kernel, gradient=True))]
    terms = [*_forward(work, kernel), *_times(back, 1 + SECOND_PASSES * twice)]
    if checks:
        wide = replace(work, itemsize=8, taps=frozenset({"output"}))
        terms += _times(_forward(wide, kernel if approximated(work) is not None else MATERIALIZED), checks)
    return _told(terms)


def inspection_terms(work: Workload, *, named: int = 0) -> list[Term]:
    """Return terms of the statistics of all weights, computed block by block; the returned weights, and ``named`` keys.

    The keys are searched in the selected heads and queries, whose rows are recomputed.
    """
    whole = replace(work, taps=frozenset({"weights"}), selected_heads=None, selected_queries=None)
    pairs = work.pairs * work.heads
    terms = [start("call"), start("inspection"), *around(whole), *stages(whole)]
    rows = min(work.queries, rows_at_once(work.batch, work.heads, work.keys))
    terms.append(start("block of statistics", -(-work.queries // max(rows, 1))))
    at_once = 8 * work.batch * work.heads * rows * work.keys
    terms.append(over_pairs("statistics", pairs * 8, work, at_once=at_once))
    if named:
        part = replace(work, taps=frozenset({"weights"}))
        terms += [start("top"), *again(part)]
        terms.append(elements("top", tap_elements(part, "weights"), marks=("many",) if named > 1 else ()))
    if "weights" in work.taps:
        terms += [*again(work), *taps(work)]
    return _told(terms)


def retrieval_terms(r: Retrieval) -> list[Term]:
    """Return the maximum number of updates of a retrieval, block by block, and its final statistics."""
    blocks = max(1, -(-r.states // max(r.rows, 1)))
    update = r.work(r.states)
    terms = [start("retrieval"), start("step", blocks * (r.steps + 1))]
    terms += _times([*stages(update), *taps(update)], r.steps)
    terms.append(over_pairs("step", r.steps * r.pairs * r.itemsize, update, at_once=r.pairs * r.itemsize / blocks))
    terms.append(over_pairs("energies", r.pairs * r.itemsize, update, at_once=r.pairs * r.itemsize / blocks))
    terms.append(moved("tokens", (r.batch * r.heads * (2 * r.states + r.patterns)) * r.width * r.itemsize, update))
    return _told(terms)


def _forward(work: Workload, kernel: str) -> Iterator[Term]:
    if work.reported:  # exact attention, block by block, and the weights that the approximation amounts to
        yield from _times(stages(exactly(work)), 2)
    if work.compared:  # once more, from the same queries, keys and values
        yield from (term for term in _forward(work.unedited, kernel) if term.name != "product projections")
    yield start("direct call" if _is_direct(work, kernel) else "call")
    yield from around(work)
    yield from _core(work, kernel)
    if approximated(work) is None:
        yield from again(work, kernel_of(work, kernel).keeps)
    yield from taps(work)


def _is_direct(work: Workload, kernel: str) -> bool:
    """True if a pass takes the direct path, with the fewest calls."""
    bare = work.taps == {"output"} and not (work.past or work.padded or work.added_keys or work.edits or work.dropped)
    alone = bare and not (work.request_mask_elements or work.batched_places or work.reported)
    here = kernel_of(work, kernel).single_call and work.threads > 0 and work.itemsize >= 4
    return alone and here and work.head_dim == work.value_dim and is_plain(work.spec)


def _core(work: Workload, kernel: str, *, gradient: bool = False) -> Iterator[Term]:
    """Yield the terms from q, k and v to the context."""
    if approximated(work) is None:
        yield from of_kernel(work, kernel, gradient=gradient)
        return
    name, counted = work.spec.method.name, method_cost(work)
    one = counted.backward if gradient else counted.forward
    marks = (f"{8 * work.itemsize} bits", "causal" if work.spec.masks else "full")
    matrices = work.batch * work.heads
    yield start(name)
    yield start(f"step of {name}", counted.steps)
    yield from factors(work)
    slopes = (("matrices", lg(matrices) - 3), ("width", lg(work.head_dim) - 6))
    inner = counted.inner * (2 if gradient else 1)
    for called, flops in ((name, one.scores + one.values - inner), (f"inside {name}", inner)):
        of_one = flops / max(matrices * max(counted.steps, 1), 1)
        yield Term(f"product {called}", "flop", flops, lg(of_one), marks=marks, slopes=slopes)
    yield elements(name, one.elementwise, marks=marks)
    found = own_traffic(work, backward=gradient).moved
    yield Term(f"bytes {name}", "byte", found, lg(found), marks=marks)


def _times(terms: Iterable[Term], times: float) -> list[Term]:
    return [replace(term, amount=times * term.amount) for term in terms]


def _told(terms: Iterable[Term]) -> list[Term]:
    """Drop empty terms, and add the page faults of tensors too large for the allocator to keep."""
    told = [term for term in terms if term.amount > 0]
    whole = (term for term in told if term.name.startswith(("pairs ", "bytes tokens")))
    fresh = sum(term.amount for term in whole if (term.size or 0) > _NOT_KEPT)
    return [*told, Term("bytes of fresh memory", "byte", fresh)] if fresh else told

"""Peak memory of the passes of a server, rehearsed on meta tensors before any of it is allocated.

The order of phases is that of the computation. Each names what is held while it runs; the peak is the largest.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from attention_service.core.edits import BoundEdit
from attention_service.core.kernels import MATERIALIZED, Kernel
from attention_service.core.kernels.materialized import Materialized
from attention_service.core.problem import Problem
from attention_service.core.rehearsal_marks import phase
from attention_service.core.stages import TAPS, stages
from attention_service.cost.extrapolation import by_pieces
from attention_service.cost.kernels import kernel_of
from attention_service.cost.memory_phases import ROUNDING, Phase, peak_of
from attention_service.cost.pairs import PAIR_TAPS, fused_masks, masks_of
from attention_service.cost.passes import Passes, registered
from attention_service.cost.rehearsal import Account, Bytes, most_held
from attention_service.cost.retrieval import Retrieval
from attention_service.cost.stand_ins import long_enough
from attention_service.cost.workload import Workload

_FEW_BLOCKS, _FEW_STEPS = 3, 3
"""Blocks of states and updates of a retrieval that are rehearsed; each of the others adds what the last one did."""


def peak_bytes(work: Workload, kernel: str) -> int:
    """The most that one forward pass holds at a time on its device, beyond the resident parameters.

    What the libraries below hold for themselves (a cuBLAS workspace, an allocator's rounding) is not in it.
    """
    return peak_of(memory_phases(work, kernel))


@lru_cache(maxsize=1024)
def memory_phases(work: Workload, kernel: str) -> tuple[Phase, ...]:
    """The tensors that are held in each phase of one forward pass."""
    work = long_enough(work)
    found = by_pieces(work, lambda piece: _forward(piece, kernel))
    return tuple(Phase(name, held) for name, held in found.items())


@lru_cache(maxsize=1024)
def _forward(work: Workload, kernel: str) -> dict[str, Bytes]:
    by = rehearsed_kernel(work, kernel)
    by = _Stages() if isinstance(by, Materialized) else by
    return held_by(work, lambda passes, resident: passes.forward(work, by, resident))


@lru_cache(maxsize=1024)
def inspection_peak_bytes(work: Workload, named: int) -> int:
    """The most that statistics, the ``named`` most attended keys and the returned weights hold at a time."""

    def held(piece: Workload) -> dict[str, Bytes]:
        return held_by(piece, lambda passes, resident: passes.inspection(piece, resident, named))

    return max(sum(each.values()) for each in by_pieces(work, held).values()) + ROUNDING


def held_by(
    work: Workload,
    run: Callable[[Passes, Mapping[str, Tensor]], object],
    *,
    first: str = "inputs",
    graph: bool = False,
) -> dict[str, Bytes]:
    """Return what a pass holds in each phase, its results to the end; ``first`` names the first phase.

    run: from the server's passes and the resident parameters to the results. ``graph``: for the way back.
    """
    passes = registered()
    resident = passes.parameters(work)

    def rehearse(account: Account) -> None:
        account.begin(first)
        account.call("inputs")
        results = run(passes, resident)
        del results  # all of them stay to the end

    pairs = work.queries, work.keys
    return most_held(rehearse, resident.values(), pairs=pairs, graph=graph, threads=work.threads)


def retrieval_peak_bytes(sizes: Retrieval) -> int:
    """The most that one Hopfield retrieval holds at a time.

    No rehearsal knows which states settle: it takes for granted that all that fall are picked out each time.
    """

    def held(blocks: int, steps: int) -> int:
        states = sizes.states - (all_blocks - blocks) * sizes.rows
        few = replace(sizes, states=states, steps=steps)
        phases = most_held(lambda _: _drop(registered().retrieval(few)), graph=False, threads=sizes.threads)
        return max(sum(each.values()) for each in phases.values())

    all_blocks = max(1, -(-sizes.states // max(sizes.rows, 1)))
    blocks, steps = min(all_blocks, _FEW_BLOCKS), min(sizes.steps, _FEW_STEPS)
    found = held(blocks, steps)
    if more := all_blocks - blocks:
        found += more * (held(blocks, steps) - held(blocks - 1, steps))
    # Each update leaves an energy for every state.
    return found + (sizes.steps - steps) * sizes.batch * sizes.heads * sizes.states * sizes.itemsize + ROUNDING


def _drop(results: object) -> None:
    """Take the results of a pass, and free them."""


def rehearsed_kernel(work: Workload, kernel: str) -> Kernel:
    """Return what computes a pass on meta tensors; edits need the materialized kernel."""
    return kernel_of(work, MATERIALIZED if work.edited else kernel).rehearsal(work)


class _Stages(Materialized):
    """The materialized kernel, each of whose stages is a phase."""

    def attend(self, problem: Problem, taps: Collection[str], edits: Sequence[BoundEdit]) -> dict[str, Tensor]:
        """Compute every stage, and keep those that are asked for."""
        wanted, found = {*taps, "context"} & {*TAPS}, {}
        known = [tap for tap in TAPS if tap != "lse" or tap in wanted]
        for tap, x in stages(problem, known, edits):
            if tap in wanted:
                found[tap] = x
            del x
            following = known[known.index(tap) + 1] if tap != "context" else "select"
            if following not in {"k", "v"}:
                phase(following, "taps" if following == "select" else following)
        return found


def makes_pairs(work: Workload, kernel: str) -> tuple[bool, bool]:
    """Return two flags: the request holds tensors over all pairs for each head, and tensors that heads share."""
    facts = kernel_of(work, kernel)
    again = work.selected_queries is None and bool(work.taps & PAIR_TAPS - facts.keeps)
    if facts.holds == "tiles":
        return again, False
    laid_out = fused_masks(work) if facts.holds == "masks" else masks_of(work)
    return facts.holds == "pairs" or again, laid_out.any

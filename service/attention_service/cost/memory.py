"""Peak memory of a forward pass, by tensor and phase, before any of it is made.

The order of phases is that of the computation. Each names what is held while it runs; the peak is the largest.
"""

from attention_service.core.memo import once
from attention_service.cost.forward_rehearsal import rehearsed_forward
from attention_service.cost.kernels import kernel_of
from attention_service.cost.pairs import PAIR_TAPS, fused_masks, masks_of
from attention_service.cost.phases import Phase, peak_of
from attention_service.cost.pieces import by_pieces
from attention_service.cost.stand_ins import long_enough
from attention_service.cost.workload import Workload, remembered


def peak_bytes(work: Workload, kernel: str) -> int:
    """The most that one forward pass holds at a time on its device, beyond the resident parameters.

    What the libraries below hold for themselves (a cuBLAS workspace, an allocator's rounding) is not in it.
    """
    return peak_of(memory_phases(work, kernel))


@once
def memory_phases(work: Workload, kernel: str) -> tuple[Phase, ...]:
    """What is held in each phase of one forward pass, by tensor."""
    return _phases(work, kernel)


@remembered
def _phases(work: Workload, kernel: str) -> tuple[Phase, ...]:
    work = long_enough(work)
    found = by_pieces(work, lambda piece: rehearsed_forward(piece, kernel))
    return tuple(Phase(name, held) for name, held in found.items())


def makes_pairs(work: Workload, kernel: str) -> tuple[bool, bool]:
    """Return two flags: the request holds tensors over all pairs for each head, and tensors that heads share."""
    facts = kernel_of(work, kernel)
    again = work.selected_queries is None and bool(work.taps & PAIR_TAPS - facts.keeps)
    if facts.holds == "tiles":
        return again, False
    laid_out = fused_masks(work) if facts.holds == "masks" else masks_of(work)
    return facts.holds == "pairs" or again, laid_out.any

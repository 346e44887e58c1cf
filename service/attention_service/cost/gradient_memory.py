"""Peak memory of gradients: gone through on the meta device, as a server answers them.

What of a graph is freed when is a matter of the order in which it is gone through, and of a graph of a graph more so.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from torch import Tensor

from attention_service.core.attention import taps_of
from attention_service.core.multihead import learned_of, parameter_shapes
from attention_service.cost.approximate import approximated
from attention_service.cost.extrapolation import by_pieces
from attention_service.cost.kernels import kernel_of
from attention_service.cost.memory import held_by, rehearsed_kernel
from attention_service.cost.memory_phases import Phase, peak_of
from attention_service.cost.pairs import fused_masks
from attention_service.cost.passes import Passes
from attention_service.cost.rehearsal import LARGEST, Bytes
from attention_service.cost.stand_ins import long_enough
from attention_service.cost.tensor_bytes import input_bytes
from attention_service.cost.workload import Workload

_TIMES = 2
"""Skip the rehearsal if a lower bound already exceeds this many times the room."""


def gradient_peak_bytes(
    work: Workload,
    kernel: str,
    names: Sequence[str] | None = None,
    *,
    twice: bool = False,
    checked: bool = False,
    room: int = LARGEST,
) -> int:
    """The most that gradients with respect to these names hold at a time, beyond the resident parameters.

    As ``gradient_phases`` has it. Where it is known at once that they need far more than ``room``, in bytes, only that
    is told.
    """
    least = _least(work, kernel)
    if least > _TIMES * min(room, LARGEST):
        return least
    return peak_of(gradient_phases(work, kernel, names, twice=twice, checked=checked))


def gradient_phases(
    work: Workload,
    kernel: str,
    names: Sequence[str] | None = None,
    *,
    twice: bool = False,
    checked: bool = False,
) -> tuple[Phase, ...]:
    """Return the memory of each phase of a forward and a backward pass, by a kernel or a method.

    names: with respect to what; None for everything that comes in and is learned. ``twice``: the gradients are
    differentiated again, along a direction of each; ``checked``: held against central differences in float64. Taps that
    are returned beside the gradients are computed again once the graph is gone.
    """
    return _phases(work, kernel, None if names is None else tuple(names), twice, checked)


@lru_cache(maxsize=1024)
def _phases(
    work: Workload, kernel: str, names: tuple[str, ...] | None, twice: bool, checked: bool
) -> tuple[Phase, ...]:
    work = long_enough(work)
    least = _least(work, kernel)
    if least > _TIMES * LARGEST:
        return (Phase("attention", {"workspace": least}),)
    at = names_of(work) if names is None else names
    held = by_pieces(work, lambda piece: _rehearsed(piece, kernel, at, twice, checked), twice=twice)
    return tuple(Phase(name, tensors) for name, tensors in held.items())


def _least(work: Workload, kernel: str) -> int:
    """Return a lower bound: the inputs, and for an exact kernel a matrix of scores or the masks."""
    holds = kernel_of(work, kernel).holds
    if approximated(work) is not None or holds == "tiles":
        return input_bytes(work)
    masks, scores = fused_masks(work).combined, work.pairs * work.heads * (holds == "pairs")
    return input_bytes(work) + work.itemsize * max(masks, scores)


@lru_cache(maxsize=1024)
def _rehearsed(work: Workload, kernel: str, names: tuple[str, ...], twice: bool, checked: bool) -> dict[str, Bytes]:
    by = rehearsed_kernel(work, kernel)

    def run(passes: Passes, resident: Mapping[str, Tensor]) -> object:
        return passes.gradients(work, by, resident, names, twice=twice, checked=checked)

    return held_by(work, run, first="attention", graph=True)


def names_of(work: Workload, *, taps: bool = False) -> tuple[str, ...]:
    """Return every name of the kinds that gradients are with respect to; ``taps``: and every tap."""
    past = ("past_key", "past_value") if work.past else ()
    mask = ("mask",) if work.request_mask_elements and not work.bool_mask else ()
    sent = [name for name in ("gate", "beta", "initial_state", "initial_normalizer") if name in work.sent]
    inputs = [name for name in ("query", "key", "value") if name in work.inputs]
    known = [tap for tap in taps_of(work.spec) if tap != "lse"] if taps else []
    learned = learned_of(work.spec, work.widths) if work.sizes is None else parameter_shapes(work.sizes)
    given = (*inputs, *past, *sent, *mask) if "inputs" in work.wrt else ()
    return (*given, *known, *(learned if "parameters" in work.wrt else ()))

"""Peak memory of gradients beyond the plain ones, rehearsed: of edited attention, of second order, with a check.

What of a graph is freed when is a matter of the order in which it is gone through, and of a graph of a graph more so.
"""

from collections.abc import Collection
from functools import partial

from attention_service.core.cost.approximate import approximated
from attention_service.core.cost.gradient_memory import gradient_peak_bytes
from attention_service.core.cost.gradient_rehearsal import rehearsed
from attention_service.core.cost.phases import ROUNDING
from attention_service.core.cost.pieces import by_pieces
from attention_service.core.cost.tensors import input_bytes
from attention_service.core.cost.workload import Workload
from attention_service.core.stages import TAPS

LARGEST = 2**46
"""Bytes that no device has. Of what needs more only that is told, and nothing of such sizes is rehearsed."""


def rehearsed_gradient_bytes(
    work: Workload, names: Collection[str], *, twice: bool = False, checked: bool = False, room: int = LARGEST
) -> int:
    """The most that gradients with respect to these names hold at a time, with the materialized kernel or by a method.

    ``twice``: they are differentiated again, along a direction of each; ``checked``: held against central differences
    in float64. Where it is known at once that they need more than ``room``, in bytes, that is told: by the plain
    gradients, of a method by what is sent.
    """
    if approximated(work) is None:
        taps = bool({*names} & {*TAPS})
        least = gradient_peak_bytes(work, taps=taps, kernel="materialized", mask="mask" in names)
    else:
        least = input_bytes(work)
    if least > min(room, LARGEST):
        return least
    phases = by_pieces(work, partial(rehearsed, names=names, twice=twice, checked=checked))
    return max(phases.values()) + ROUNDING

"""The cost of attributions: memory rehearsed as a server runs them, and the FLOPs of their matrix products."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from attention_service.core.kernels import MATERIALIZED
from attention_service.cost.extrapolation import by_pieces
from attention_service.cost.memory import held_by
from attention_service.cost.memory_phases import ROUNDING
from attention_service.cost.passes import Passes
from attention_service.cost.rehearsal import Bytes
from attention_service.cost.tensor_bytes import tap_elements
from attention_service.cost.time import executed_flops
from attention_service.cost.workload import Workload

_POINTS = 2
"""Points of a path that are rehearsed: each further one holds as much as the second."""


@lru_cache(maxsize=1024)
def attribution_peak_bytes(
    work: Workload, methods: tuple[str, ...], compared: bool, points: int, classes: int
) -> int:  # fmt: skip
    """The most that these attributions hold at a time, beyond the resident parameters.

    compared: with and without the edits. ``points``: of the path of L; ``classes``: of the readout, 0 for none.
    """

    def held(piece: Workload) -> dict[str, Bytes]:
        def run(passes: Passes, resident: Mapping[str, Tensor]) -> object:
            few = min(points, _POINTS)
            return passes.attribution(piece, resident, methods, compared=compared, points=few, classes=classes)

        return held_by(piece, run, graph=True)

    return max(sum(each.values()) for each in by_pieces(work, held).values()) + ROUNDING


def attribution_flops(work: Workload, methods: tuple[str, ...], compared: bool, points: int, classes: int) -> int:
    """FLOPs of the matrix products: the context, the way back to it, the weights again, and each method over pairs."""
    whole = replace(work, taps=frozenset({"output"}), selected_heads=None, selected_queries=None)
    pairs = tap_elements(replace(work, taps=frozenset({"weights"})), "weights")
    once = executed_flops(whole, MATERIALIZED)
    merged = work.heads * work.value_dim
    width = merged if work.d_model is None else work.d_model
    out = 0 if work.d_model is None else 2 * work.batch * work.queries * merged * width
    once += points * (2 * out + 3 * 2 * work.batch * work.queries * width * classes)
    once += 2 * pairs * work.key_dim
    of_gradients = ("integrated" in methods) + (not {"gradient_attention", "relevance"}.isdisjoint(methods))
    once += 2 * pairs * work.value_dim * of_gradients
    if "norm" in methods:
        heads = work.heads if work.selected_heads is None else work.selected_heads
        once += 2 * pairs * heads
        if work.d_model is not None:
            once += 2 * heads**2 * work.value_dim**2 * (work.batch * work.keys + width)
    return once * (1 + compared)

"""Check that fitted curves grow with the length as the computation does; a disturbed machine's may not."""

from itertools import pairwise
from math import log2
from typing import Final

from attention_contract.spec import AttentionSpec
from attention_service.cost import Clock, Workload, executed_flops
from attention_service.runtime.operations.random_requests import kinds
from attention_service.runtime.operations.random_specs import approximations

_LENGTHS: Final = (512, 1024, 2048, 4096)
_OCTAVE: Final = 0.75
"""Maximum excess of the exponent between neighbouring lengths over that of the FLOPs: a cache may end there."""
_WHOLE: Final = 0.5
"""Maximum excess between the first and the last length."""


def implausible_growth(clock: Clock) -> str | None:
    """Describe the first exponent of a clock that leaves the known order; None if all are plausible.

    Predicted times of forward passes and gradients must grow with the length, and little faster than their FLOPs.
    """
    for purpose, kernel in kinds():
        if purpose not in {"forward", "gradients"}:
            continue
        predict = clock.gradients if purpose == "gradients" else clock.forward
        works = [_work(kernel, length) for length in _LENGTHS]
        seconds = [predict(work, kernel).median for work in works]
        flops = [executed_flops(work, kernel) for work in works]
        octaves = len(_LENGTHS) - 1
        whole = log2(seconds[-1] / seconds[0]) / octaves, log2(flops[-1] / flops[0]) / octaves, _WHOLE
        steps = [
            (log2(time[1] / time[0]), log2(work[1] / work[0]), _OCTAVE)
            for time, work in zip(pairwise(seconds), pairwise(flops), strict=True)
        ]
        for exponent, order, beyond in (whole, *steps):
            if not 0 <= exponent <= order + beyond:
                return f"{purpose} {kernel} grows as n^{exponent:.2f}, and its FLOPs as n^{order:.2f}"
    return None


def _work(kernel: str, length: int) -> Workload:
    """Self-attention by a kernel, or by a method of this name with its defaults."""
    spec = AttentionSpec()
    if kernel in approximations():
        options = {"length": _LENGTHS[-1], "rank": 64} if kernel == "linformer" else {}
        spec = AttentionSpec.model_validate({"method": {"name": kernel} | options})
    return Workload(
        batch=1, queries=length, keys=length, heads=8, kv_heads=8, head_dim=64, value_dim=64, itemsize=4, spec=spec
    )

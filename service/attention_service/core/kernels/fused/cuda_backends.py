"""The fastest of PyTorch's fused kernels on a GPU, measured by the GPU's own events.

Beside its flash kernel PyTorch has one that takes any mask and type ("efficient") and cuDNN's; which of them is the
fastest depends on the GPU, the type and the length. Its own order is the same everywhere.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
LENGTHS = (256, 1024, 4096)
"""At which they are compared; what is longer goes by the last."""
_HEADS = 8
_RUNS = 5
_UNCHANGED = nullcontext()
Timer = Callable[[Callable[[], object]], float]


def fastest(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> AbstractContextManager[None]:
    """A context in which scaled dot product attention takes the fastest kernel that it can for these arguments.

    Nothing is changed on a CPU; with a mask, for which kernels differ in what they take; and where there is a gradient,
    whose kernel goes with it.
    """
    if not q.is_cuda or mask is not None or q.dtype == torch.float64:
        return _UNCHANGED
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return _UNCHANGED
    length = next((each for each in LENGTHS if k.shape[2] <= each), LENGTHS[-1])
    if torch.cuda.is_current_stream_capturing():  # nothing can be timed now
        return _UNCHANGED
    order = ranked(q.device, q.dtype, q.shape[3], length, causal)
    return sdpa_kernel([*order, SDPBackend.MATH], set_priority=True)


@cache
def ranked(
    device: torch.device, dtype: torch.dtype, width: int, length: int, causal: bool, timer: Timer | None = None
) -> tuple[SDPBackend, ...]:
    """The fused kernels from the fastest to the slowest; those that do not take it come last, in PyTorch's order."""
    q, k, v = (torch.randn(1, _HEADS, length, width, dtype=dtype, device=device) for _ in range(3))
    timed = timer or _seconds

    def seconds(backend: SDPBackend) -> float:
        try:
            with sdpa_kernel(backend):
                return timed(lambda: scaled_dot_product_attention(q, k, v, is_causal=causal))
        except RuntimeError:  # it was not built, or takes no such arguments
            return float("inf")

    return tuple(sorted(FUSED, key=seconds))


def _seconds(run: Callable[[], object]) -> float:
    """Return the median time of some runs, by the device's events."""
    run()  # code is loaded, and plans are made
    return median(_once(run) for _ in range(_RUNS))


def _once(run: Callable[[], object]) -> float:
    started, ended = _events()
    started.record()
    run()
    ended.record()
    ended.synchronize()
    return float(started.elapsed_time(ended)) / 1e3


def _events() -> Iterator[torch.cuda.Event]:
    return (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

"""Slices of long operations, and phases of a computation.

An operation of many FLOPs on a CPU is cut, so that a checkpoint comes between the pieces. Marks tell a rehearsal its
phases apart; on real tensors they do nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

SLICE_FLOPS = 1e9
"""FLOPs of one thread between two checkpoints: 15 to 50 ms on today's processors."""
_rehearsed_threads: ContextVar[int | None] = ContextVar("rehearsed_threads", default=None)


@contextmanager
def rehearsed_on(threads: int) -> Iterator[None]:
    """Let operations on meta tensors be cut as on a CPU with so many threads; 0 for a GPU, which cuts nothing."""
    before = _rehearsed_threads.set(threads)
    try:
        yield
    finally:
        _rehearsed_threads.reset(before)


def slice_flops() -> float:
    """FLOPs of one operation on the CPU, above which it is cut into slices."""
    return SLICE_FLOPS * (_rehearsed_threads.get() or torch.get_num_threads())


def exceeds_a_slice(work: float) -> bool:
    """Return True if one operation of this many FLOPs is more than a slice. Small work reads no number of threads."""
    return work > SLICE_FLOPS and work > slice_flops()


def on_gpu(x: Tensor) -> bool:
    """Return True for a tensor on a GPU, and where one is rehearsed."""
    return x.is_cuda or (x.is_meta and _rehearsed_threads.get() == 0)


def cuts(x: Tensor) -> bool:
    """Return True if long operations on this tensor are cut: on a CPU, and where one is rehearsed."""
    return x.device.type == "cpu" or (x.is_meta and bool(_rehearsed_threads.get()))


_modes = torch._C._len_torch_dispatch_stack


def phase(name: str | None, tensors: str, over_pairs: str | None = None) -> None:
    """Begin a phase of this name; None goes on with the last one. Tensors made from now on are called ``tensors``.

    over_pairs: the name of those with a number for each query and key, if it is another.
    """
    if not _modes():
        return
    mode = cast("Any", _get_current_dispatch_mode())
    if hasattr(mode, "begin"):
        if name is not None:
            mode.begin(name)
        mode.call(tensors, over_pairs)

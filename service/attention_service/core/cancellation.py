"""Cooperative cancellation: loops of long work call ``checkpoint``, which stops the work of a cancelled request."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor


class Abandoned(Exception):
    """Nobody waits for the work any more."""


class Cancellation:
    """A flag that one thread sets and the working thread reads, and the time of its last checkpoint."""

    __slots__ = ("cancelled", "seen")

    def __init__(self) -> None:
        self.cancelled = False
        self.seen = 0.0
        """``time.monotonic`` seconds of the last checkpoint; 0 before the first."""

    def cancel(self) -> None:
        """Stop the work at its next checkpoint."""
        self.cancelled = True


_current: ContextVar[Cancellation | None] = ContextVar("cancellation", default=None)


@contextmanager
def cancellable(cancellation: Cancellation) -> Iterator[None]:
    """Let ``checkpoint`` in this thread stop the block when the flag is set."""
    before = _current.set(cancellation)
    try:
        yield
    finally:
        _current.reset(before)


def checkpoint() -> None:
    """Raise Abandoned if the current work was given up. Call it once per block, tile, step or chunk."""
    current = _current.get()
    if current is None:
        return
    if current.cancelled:
        raise Abandoned
    current.seen = time.monotonic()


def checked(x: Tensor) -> Tensor:
    """The tensor, with a checkpoint now and another when its gradient is computed."""
    checkpoint()
    if x.requires_grad:
        x.register_hook(_on_gradient)  # type: ignore[no-untyped-call]
    return x


def _on_gradient(_: Tensor) -> None:
    checkpoint()


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

"""Cooperative cancellation: loops of long work call ``checkpoint``, which stops the work of a cancelled request."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Abandoned(Exception):
    """Nobody waits for the work any more."""


class Cancellation:
    """A flag that one thread sets and the working thread reads, and the time of its last checkpoint."""

    __slots__ = ("cancelled", "deadline", "seen")

    def __init__(self, deadline: float | None = None) -> None:
        """``deadline``: ``time.monotonic`` seconds at which the caller leaves; None for never."""
        self.cancelled = False
        self.deadline = math.inf if deadline is None else deadline
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


def deadline() -> float:
    """The ``time.monotonic`` seconds at which the caller of the current work leaves; infinite for never."""
    current = _current.get()
    return math.inf if current is None else current.deadline


def checked(x: "Tensor") -> "Tensor":
    """The tensor, with a checkpoint now and another when its gradient is computed."""
    checkpoint()
    if x.requires_grad:
        x.register_hook(_on_gradient)  # type: ignore[no-untyped-call]
    return x


def _on_gradient(_: "Tensor") -> None:
    checkpoint()

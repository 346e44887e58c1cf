"""Runs: adjacent slots of a cache, which are read as views."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor


class Slots(Protocol):
    """Memory of a cache, in which slot s holds the key and the value of one token."""

    @property
    def keys(self) -> Tensor:
        """Keys, ``[Hkv, slots, D]``, whose last dimension is contiguous."""

    @property
    def values(self) -> Tensor:
        """Values, ``[Hkv, slots, V]``, likewise."""

    @property
    def paged(self) -> bool:
        """True if it lies as PyTorch's kernel for block tables reads it."""


SlotsT_co = TypeVar("SlotsT_co", bound=Slots, covariant=True)


@dataclass(slots=True)  # made for each sequence of each step: a frozen one takes four times as long to make
class SlotRun(Generic[SlotsT_co]):
    """Adjacent slots of a cache."""

    slab: SlotsT_co
    start: int
    tokens: int

    @property
    def stop(self) -> int:
        """The slot after the last."""
        return self.start + self.tokens

    @property
    def keys(self) -> Tensor:
        """A view of the keys, ``[Hkv, L, D]``."""
        return self.slab.keys[:, self.start : self.start + self.tokens]

    @property
    def values(self) -> Tensor:
        """A view of the values, ``[Hkv, L, V]``."""
        return self.slab.values[:, self.start : self.start + self.tokens]


def merged(runs: Sequence[SlotRun[SlotsT_co]]) -> list[SlotRun[SlotsT_co]]:
    """The same slots in the same order, with adjacent runs as one."""
    joined: list[SlotRun[SlotsT_co]] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and last.slab is run.slab and last.start + last.tokens == run.start:
            joined[-1] = SlotRun(last.slab, last.start, last.tokens + run.tokens)
        else:
            joined.append(run)
    return joined


def first_of(runs: Sequence[SlotRun[SlotsT_co]], tokens: int) -> list[SlotRun[SlotsT_co]]:
    """The slots of the first tokens."""
    beginnings = []
    for run in runs:
        here = min(run.tokens, tokens)
        if not here:
            break
        beginnings.append(SlotRun(run.slab, run.start, here))
        tokens -= here
    return beginnings


def after(runs: Sequence[SlotRun[SlotsT_co]], tokens: int) -> list[SlotRun[SlotsT_co]]:
    """The slots of all tokens but the first."""
    rests = []
    for run in runs:
        skipped = min(run.tokens, tokens)
        if skipped < run.tokens:
            rests.append(SlotRun(run.slab, run.start + skipped, run.tokens - skipped))
        tokens -= skipped
    return rests


def cut(runs: Sequence[SlotRun[SlotsT_co]], size: int) -> list[SlotRun[SlotsT_co]]:
    """The same slots in the same order, cut at every slot that is a multiple of ``size``."""
    pieces = []
    for run in runs:
        start, end = run.start, run.start + run.tokens
        while start < end:
            stop = min(end, (start // size + 1) * size)
            pieces.append(SlotRun(run.slab, start, stop - start))
            start = stop
    return pieces

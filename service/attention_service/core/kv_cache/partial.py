"""Parts of attention over a cache: stacked queries, adjacent keys, and the context of some of the keys.

Source: Milakov & Gimelshein 2018 (merging by the log-sum-exp).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from attention_service.core.cancellation import checkpoint
from attention_service.core.masks.bands import Band
from attention_service.core.positions.base import Heads, Position

MOST_SCORES = 2**21
"""Scores in memory at a time, for all heads together: 8 MiB, and less than a slice's work between two checkpoints."""


class Slots(Protocol):
    """Memory of a cache, in which slot s holds the key and the value of one token."""

    @property
    def keys(self) -> Tensor:
        """Keys, ``[Hkv, slots, D]``, whose last dimension is contiguous."""

    @property
    def values(self) -> Tensor:
        """Values, ``[Hkv, slots, V]``, likewise."""


SlotsT_co = TypeVar("SlotsT_co", bound=Slots, covariant=True)

# Made for each sequence of each step, so none is frozen: a frozen one takes four times as long to make.


@dataclass(slots=True)
class Run(Generic[SlotsT_co]):
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
        return self.slab.keys[:, self.start : self.stop]

    @property
    def values(self) -> Tensor:
        """A view of the values, ``[Hkv, L, V]``."""
        return self.slab.values[:, self.start : self.stop]


@dataclass(eq=False, slots=True)
class Rows:
    """Queries of one or several sequences, stacked."""

    q: Tensor
    """``[H, R, D]``"""
    places: Sequence[int]
    """Place of each query, R of them."""


@dataclass(eq=False, slots=True)
class Piece:
    """Adjacent keys and values, and the place of the first in its sequence."""

    run: Run[Slots]
    first: int

    @property
    def end(self) -> int:
        """Place after the last key."""
        return self.first + self.run.tokens

    def cut(self, start: int, stop: int) -> "Piece":
        """Return the keys from place ``start`` up to ``stop``."""
        first, end = max(start, self.first), min(stop, self.end)
        return Piece(Run(self.run.slab, self.run.start + first - self.first, end - first), first)


@dataclass(eq=False, slots=True)
class Partial:
    """Context of stacked queries over some of their keys. Both tensors have the dtype of the softmax."""

    context: Tensor
    """``[H, R, V]``"""
    lse: Tensor
    """``[H, R, 1]``: log Σ exp(masked score / T)."""

    def merge(self, other: "Partial") -> "Partial":
        """Return the context over the keys of both."""
        share = torch.sigmoid(other.lse - self.lse)
        return Partial(torch.lerp(self.context, other.context, share), torch.logaddexp(self.lse, other.lse))


@dataclass(eq=False, slots=True)
class Products:
    """Partial contexts by matrix products: any number of queries, and every spec that attention in place computes."""

    scale: float
    softcap: float | None
    position: Position
    band: Band
    temperature: float
    learned: Mapping[str, Tensor]

    def attend(self, rows: Rows, piece: Piece) -> Partial:
        """Attend to the keys of a piece, as many at a time as leaves room for their scores."""
        heads, count, _ = rows.q.shape
        most = max(MOST_SCORES // (heads * count), 64)
        starts = range(piece.first, piece.end, most)
        return reduce(Partial.merge, (self._block(rows, piece.cut(start, start + most)) for start in starts))

    def _block(self, rows: Rows, piece: Piece) -> Partial:
        checkpoint()
        heads, count, width = rows.q.shape
        kv_heads, keys, _ = (given := piece.run.keys).shape
        q = rows.q.reshape(kv_heads, heads // kv_heads * count, width)  # keys are read once for all heads of a group
        scores = _products(q, given).mul_(self.scale)
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        by_head = scores.view(heads, count, keys)
        if (bias := self._bias(rows, piece, heads, scores.dtype)) is not None:
            by_head += bias
        if self.temperature != 1:
            scores /= self.temperature
        self._hide(by_head, rows, piece)
        largest = scores.amax(-1, keepdim=True)
        weights = scores.softmax(-1)
        lse = largest - weights.amax(-1, keepdim=True).log_()
        values = piece.run.values
        context = torch.bmm(weights.to(values.dtype), values).to(weights.dtype)
        return Partial(context.view(heads, count, -1), lse.view(heads, count, 1))

    def _bias(self, rows: Rows, piece: Piece, heads: int, dtype: torch.dtype) -> Tensor | None:
        """Return the bias of the position encoding, ``[H, R, L]``."""
        if not self.position.biased:
            return None
        queries = torch.tensor(rows.places, device=rows.q.device)[None]
        keys = torch.arange(piece.first, piece.end, device=rows.q.device)[None]
        bias = self.position.bias(queries, keys, Heads(heads), self.learned, dtype)
        return None if bias is None else bias[0]

    def hides(self, rows: Rows, piece: Piece) -> bool:
        """Return True if the band hides a key of the piece from one of the queries."""
        low, high = self.band.low, self.band.high
        ahead = high is not None and piece.end - 1 > min(rows.places) + high
        return ahead or (low is not None and piece.first < max(rows.places) + low)

    def _hide(self, scores: Tensor, rows: Rows, piece: Piece) -> None:
        """Fill the scores that the band forbids. The lowest number keeps a row that sees nothing here finite."""
        if not self.hides(rows, piece):
            return
        places = torch.tensor(rows.places, device=scores.device)[:, None]
        allowed = self.band.allows(places, torch.arange(piece.first, piece.end, device=scores.device)[None])
        scores.masked_fill_(~allowed, torch.finfo(scores.dtype).min)


def _products(q: Tensor, keys: Tensor) -> Tensor:
    """q·k in float32 or wider, from q ``[Hkv, R, D]`` and keys ``[Hkv, L, D]`` to ``[Hkv, R, L]``."""
    rounded = torch.bmm(q, keys.mT)
    if q.dtype.itemsize > 2:
        return rounded
    # A product in a half type is rounded to it. The remainder is a second product, which starts from minus the first.
    remainder = torch.baddbmm(rounded, q, keys.mT, beta=-1)
    return rounded.float().add_(remainder)

"""What goes into one attention and what comes out.

Notation for shapes, here and in all of ``core``: B batch, H query heads, Hkv key/value heads, Q queries, K keys (the
past included), P past keys, D head width, V value width.
"""

from dataclasses import dataclass, field

from torch import Tensor

from attention_contract.spec import AttentionSpec


@dataclass(frozen=True)
class Problem:
    """One attention, batched and split into heads."""

    q: Tensor
    """``[B, H, Q, D]``"""
    k: Tensor
    """``[B, Hkv, K, D]``, the past included."""
    v: Tensor
    """``[B, Hkv, K, V]``"""
    spec: AttentionSpec = field(default_factory=AttentionSpec)
    mask: Tensor | None = None
    """Bool (true lets a query look) or float (added), of rank 1 to 4, broadcastable to ``[B, H, Q, K]``; a last
    dimension shorter than K (and not 1) hides the rest."""
    key_mask: Tensor | None = None
    """Bool ``[B, K]``, true for a real key."""
    key_lengths: Tensor | None = None
    """Integer ``[B]``: how many keys from the first on are real."""
    past: int = 0
    """P: how many of the keys are from the past."""
    offsets: Tensor | None = None
    """Integer ``[B]`` or ``[]``, added to the query's index in every positional mask; None stands for P."""


@dataclass(frozen=True)
class Selection:
    """Which heads and queries of a tap to keep; None keeps all."""

    heads: tuple[int, ...] | None = None
    queries: tuple[int, ...] | None = None

"""What goes into one attention and what comes out.

Notation for shapes, here and in all of ``core``: B batch, H query heads, Hkv key/value heads, Q queries, K keys (the
past included), P past keys, D head width, V value width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from attention_contract.spec import AttentionSpec, Mask


@dataclass(frozen=True)
class Widths:
    """What the shapes of learned tensors depend on."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    d_model: int | None = None
    """Of a module; None for raw attention."""
    own_key_dim: int | None = None
    """Width of the keys where it differs from ``head_dim``, the width of the queries."""

    @property
    def key_dim(self) -> int:
        """Width of the keys."""
        return self.own_key_dim or self.head_dim


@dataclass(frozen=True)
class Learned:
    """One learned tensor of a spec: its shape, how it begins, and where its heads are."""

    shape: tuple[int, ...]
    fill: float | None = None
    """What every element begins as; None draws them Xavier-uniform, over the last two dimensions."""
    heads: int | None = 0
    """Which dimension counts query heads; None where there is none."""


@dataclass(frozen=True)
class Dropout:
    """Weights put to zero at random, the rest divided by 1 − p."""

    p: float
    seed: int


@dataclass(frozen=True)
class Running:
    """What a running state (method ``linear``) is given beside q, k and v; F is the number of features."""

    log_gate: Tensor | None = None
    """``[B, Hkv, K, 1 or F]``, at most 0: the logarithm of what remains of the state at a token."""
    beta: Tensor | None = None
    """``[B, Hkv, K, 1]``: how far a token's write replaces what its key reads."""
    state: Tensor | None = None
    """``[B, Hkv, F, V]``: what was written before the first key; None for nothing."""
    normalizer: Tensor | None = None
    """``[B, Hkv, F]``: the sum of features that belongs to it, where there is a division by one."""
    wanted: bool = False
    """Whether the state after the last key is wanted."""


_NOT_RUNNING = Running()


@dataclass(eq=False, slots=True)  # not frozen: that takes four times as long to make
class Problem:
    """One attention, batched and split into heads. Nothing changes it once it is made."""

    q: Tensor
    """``[B, H, Q, D]``, normed and turned as the spec has it."""
    k: Tensor
    """``[B, Hkv, K, D]``, normed and turned; the past first and what the spec adds last. An additive or bilinear score
    takes keys of another width than D."""
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
    sequence_masks: tuple[Sequence[Mask], ...] | None = None
    """The spec's masks of each sequence, where they differ by their global tokens; None where all have the spec's."""
    past: int = 0
    """P: how many of the keys are from the past."""
    offsets: Tensor | None = None
    """Integer ``[B]`` or ``[]``, added to the query's index in every positional mask; None stands for P."""
    positions: Tensor | None = None
    """Integer ``[B, Q]``: the places of the queries and of as many new keys, for the position encoding alone."""
    learned: Mapping[str, Tensor] = field(default_factory=dict)
    """The learned tensors of the spec, by name."""
    running: Running = _NOT_RUNNING
    """What a running state is given."""
    dropout: Dropout | None = None
    apart: tuple[Tensor, Tensor, Tensor] | None = None
    """Of other projections, in the shapes of q, k and v: what some of the queries are and see (``core.apart``)."""
    finite: bool = False
    """True if all keys and values are known to be finite; otherwise their numbers tell."""
    extra: int = 0
    """How many of the keys, the last ones, the spec added: no mask hides them. In masks K counts those before them."""

    @property
    def widths(self) -> Widths:
        """What the shapes of its learned tensors depend on."""
        return Widths(self.q.shape[1], self.k.shape[1], self.q.shape[3], self.v.shape[3], own_key_dim=self.k.shape[3])

    @property
    def keys(self) -> int:
        """How many keys there are without those that the spec added."""
        return self.k.shape[2] - self.extra


def added_keys(spec: AttentionSpec) -> int:
    """How many keys a spec adds after all others."""
    return int(spec.add_bias_kv) + int(spec.add_zero_attn)


@dataclass(frozen=True)
class Selection:
    """Which heads and queries of a tap to keep; None keeps all."""

    heads: tuple[int, ...] | None = None
    queries: tuple[int, ...] | None = None

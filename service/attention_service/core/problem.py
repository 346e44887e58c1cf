"""Inputs and outputs of one attention.

Notation for shapes, here and in all of ``core``: B batch, H query heads, Hkv key/value heads, Q queries, K keys (the
past included), P past keys, D head width, V value width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from attention_contract.spec import AttentionSpec, Mask


@dataclass(frozen=True)
class Widths:
    """Widths that determine the shapes of learned tensors."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    d_model: int | None = None
    """Width of the model; None for raw attention."""
    own_key_dim: int | None = None
    """Width of the keys where it differs from ``head_dim``, the width of the queries."""

    @property
    def key_dim(self) -> int:
        """Width of the keys."""
        return self.own_key_dim or self.head_dim


@dataclass(frozen=True)
class Learned:
    """One learned tensor of a spec: its shape, its initial value and its head dimension."""

    shape: tuple[int, ...]
    fill: float | None = None
    """Initial value of every element; None draws them Xavier-uniform, over the last two dimensions."""
    heads: int | None = 0
    """Dimension that counts query heads; None if there is none."""


@dataclass(frozen=True)
class WeightDropout:
    """Dropout: random weights become zero, the rest is divided by 1 − p."""

    p: float
    seed: int
    first: int = 0
    """Index of the first sequence, on which the weights that are dropped depend too."""


@dataclass(frozen=True)
class RunningInputs:
    """Inputs of a running state (method ``linear``) beside q, k and v; F is the number of features."""

    log_gate: Tensor | None = None
    """``[B, Hkv, K, 1 or F]``, at most 0: the logarithm of what remains of the state at a token."""
    beta: Tensor | None = None
    """``[B, Hkv, K, 1]``: the share of the retrieved value that a token's write replaces."""
    state: Tensor | None = None
    """``[B, Hkv, F, V]``: the state before the first key; None for an empty one."""
    normalizer: Tensor | None = None
    """``[B, Hkv, F]``: the sum of features of that state, if the output is normalized."""
    wanted: bool = False
    """True if the state after the last key is wanted."""


_NOT_RUNNING = RunningInputs()


@dataclass(eq=False, slots=True)  # not frozen: that takes four times as long to make
class Problem:
    """One attention, batched and split into heads. Nothing changes it once it is made."""

    q: Tensor
    """``[B, H, Q, D]``, normed and rotated as in the spec."""
    k: Tensor
    """``[B, Hkv, K, D]``, normed and rotated; the past first, keys that the spec adds last. An additive or bilinear
    score takes keys of another width than D."""
    v: Tensor
    """``[B, Hkv, K, V]``"""
    spec: AttentionSpec = field(default_factory=AttentionSpec)
    mask: Tensor | None = None
    """Bool (true lets a query look) or float (added), of rank 1 to 4, broadcastable to ``[B, H, Q, K]``; a last
    dimension shorter than K (and not 1) hides the rest."""
    key_mask: Tensor | None = None
    """Bool ``[B, K]``, true for a real key."""
    key_lengths: Tensor | None = None
    """Integer ``[B]``: number of real keys, which are the first."""
    sequence_masks: tuple[Sequence[Mask], ...] | None = None
    """The spec's masks per sequence, if their global tokens differ; None if all sequences have the spec's."""
    past: int = 0
    """P: number of keys from the past."""
    offsets: Tensor | None = None
    """Integer ``[B]`` or ``[]``, added to the query's index in every positional mask; None stands for P."""
    positions: Tensor | None = None
    """Integer ``[B, Q]``: the places of the queries and of as many new keys, for the position encoding alone."""
    learned: Mapping[str, Tensor] = field(default_factory=dict)
    """The learned tensors of the spec, by name."""
    recurrent: RunningInputs = _NOT_RUNNING
    """Inputs of a running state."""
    dropout: WeightDropout | None = None
    global_qkv: tuple[Tensor, Tensor, Tensor] | None = None
    """Global queries, keys and values, in the shapes of q, k and v, from projections of their own
    (``core.masks.global_projections``)."""
    finite: bool = False
    """True if all keys and values are known to be finite, and padding to need no zeros; otherwise they are checked."""
    given: Tensor | None = None
    """``[B, H, Q, K]``: weights that something else has computed; q, k and v then say sizes alone, and no tap before
    the weights nor the context can be computed."""
    implicit: bool = False
    """True if ``given`` are implicit weights: they may be negative, and need not sum to 1."""
    added_keys: int = 0
    """Number of keys, at the end, that the spec added: no mask hides them. In masks K excludes them."""

    @property
    def widths(self) -> Widths:
        """Widths that determine the shapes of the learned tensors."""
        return Widths(self.q.shape[1], self.k.shape[1], self.q.shape[3], self.v.shape[3], own_key_dim=self.k.shape[3])

    @property
    def keys(self) -> int:
        """Number of keys without those that the spec added."""
        return self.k.shape[2] - self.added_keys


def added_keys(spec: AttentionSpec) -> int:
    """Return the number of keys that a spec adds after all others."""
    return int(spec.add_bias_kv) + int(spec.add_zero_attn)


@dataclass(frozen=True)
class Span:
    """Keys side by side."""

    start: int
    stop: int
    masked: bool = True
    """False if the masks of positions let every query of the selection look at each of these keys."""

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Selection:
    """Heads, queries and keys of a tap to keep; None keeps all."""

    heads: Sequence[int] | None = None
    """A range of heads that reads whole key/value heads keeps these as they are; a tuple repeats one for each."""
    queries: Sequence[int] | None = None
    keys: tuple[Span, ...] | None = None
    """In ascending order. Keys that the spec adds are always kept."""

    def keys_of(self, problem: Problem) -> tuple[Span, ...] | None:
        """Return the spans among all keys of a problem, those that the spec added included."""
        if self.keys is None or not problem.added_keys:
            return self.keys
        return (*self.keys, Span(problem.keys, problem.k.shape[2], masked=False))

"""A request with its sizes known: what binding finds, and what everything after it reads."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from attention_contract.errors import ShapeMismatch
from attention_contract.spec import AttentionSpec, Mask
from attention_contract.tensors import Array
from attention_service.core.types import Dropout, added_keys
from attention_service.modules.resident import Module

MAX_EMPTY = 2**22
"""What the other sizes of a tensor without elements may multiply to: it costs nothing to send, and what is made of its
sizes alone (positions, masks, statistics) would."""


@dataclass(frozen=True)
class Layout:
    """What the query's layout left out, to be left out of the reply as well."""

    batched: bool = True
    headed: bool = True
    """False for a raw ``[Q, D]``: one head without a dimension of its own."""
    merged: bool = False
    """Heads lie side by side in the last dimension: ``[B, L, heads·W]``."""


@dataclass(eq=False)  # not frozen: that takes four times as long to make
class Bound:
    """One attention with its sizes known and its arrays batched. Nothing changes it once it is made.

    B batch, H query heads, Hkv key/value heads, Q queries, K keys (the past included), P past keys.
    """

    module: Module | None
    spec: AttentionSpec
    layout: Layout
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    """The past and what the spec adds included."""
    past: int
    head_dim: int
    value_dim: int
    dtype: str
    """What is computed in."""
    reply_dtype: str
    """What is answered in: that of the query, where it states one."""
    arrays: dict[str, Array] = field(repr=False)
    """The tensors that came, by field, each with its batch dimension (and its head dimension where it has one)."""
    value_is: str
    """The field that the values come from: value, key or query."""
    dropout: Dropout | None = None
    learned: dict[str, Array] = field(default_factory=dict, repr=False)
    """The learned tensors that came with a raw request, by name; those of a module are its own."""

    sequence_masks: tuple[Sequence[Mask], ...] | None = None
    """The spec's masks with the request's global tokens: of each sequence, or once if all are the same."""
    own_key_dim: int | None = None
    """Width of a head's keys where it differs from ``head_dim``, that of its queries."""
    state_wanted: bool = False
    """Whether the running state after the last key is part of the reply."""

    def of(self, **changes: Any) -> "Bound":
        """As ``dataclasses.replace``, in a tenth of its time."""
        made = object.__new__(Bound)
        made.__dict__.update(self.__dict__, **changes)
        return made

    @property
    def key_dim(self) -> int:
        """Width of a head's keys."""
        return self.own_key_dim or self.head_dim

    @property
    def extra(self) -> int:
        """How many keys the spec adds."""
        return added_keys(self.spec)

    @property
    def new_keys(self) -> int:
        """How many keys came with this request."""
        return self.keys - self.past - self.extra

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The batched shape of the output."""
        if self.module is not None:
            return (self.batch, self.queries, self.module.sizes.d_model)
        if self.layout.merged:
            return (self.batch, self.queries, self.heads * self.value_dim)
        return (self.batch, self.heads, self.queries, self.value_dim)


def wrong_shape(name: str, expected: str, array: Array | None) -> ShapeMismatch:
    """The error of a tensor whose shape is not what its role asks for."""
    actual = list(array.shape) if array is not None else None
    return ShapeMismatch(
        f"{name}: expected {expected}; got shape {actual}", param=name, expected=expected, actual=actual
    )


def widened(array: Array, layout: Layout) -> Array:
    """A tensor of the query's rank with the dimensions that the query's layout leaves out."""
    if not layout.batched:
        array = array[None]
    return array if layout.headed else array[:, None]


def strip(value: Tensor, layout: Layout, *, heads_axis: bool) -> Tensor:
    """Leave out of a batched result what the query's layout left out."""
    if not layout.headed and heads_axis:
        value = value[:, 0]
    return value if layout.batched else value[0]

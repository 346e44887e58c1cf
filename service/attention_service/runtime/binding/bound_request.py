"""A bound request: its sizes and checked tensors, the input of planning and execution."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from attention_contract.errors import InvalidTensor, ShapeMismatch
from attention_contract.spec import AttentionSpec, Mask
from attention_contract.tensors import Array, Untyped, dtype_name
from attention_service.core.kernels.fused.cpu_blocks import CUT
from attention_service.core.kv_cache.past import Cached
from attention_service.core.multihead import Sizes
from attention_service.core.positions.token_positions import MAX_POSITION
from attention_service.core.problem import Dropout
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.cost.attention import Attention
from attention_service.modules.resident import Module

_MAX_EMPTY = 2**22
"""Limit of the product of a tensor's other sizes if one size is 0: such a tensor costs nothing to send, but positions,
masks and statistics of its sizes would cost memory."""


@dataclass(frozen=True)
class Layout:
    """Dimensions that the query omits, which the reply omits too."""

    batched: bool = True
    headed: bool = True
    """False for a raw ``[Q, D]``: one head without a dimension of its own."""
    merged: bool = False
    """Heads lie side by side in the last dimension: ``[B, L, heads·W]``."""


_CARRIED = frozenset({"gate", "beta", "initial_state", "initial_normalizer"})
_INPUTS = frozenset({"query", "key", "value"})


@dataclass(eq=False)  # not frozen: that takes four times as long to make
class BoundRequest(Attention):
    """One attention with its sizes known and its arrays batched. Nothing changes it once it is made.

    It is the only description of an attention: kernels and the cost model read it, and what it would hold is found with
    a blank one, whose arrays have shapes alone (``planning.blank_requests``).

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
    """Number of keys, with the past and the keys that the spec adds."""
    past: int
    head_dim: int
    value_dim: int
    dtype: str
    """Dtype of the computation."""
    reply_dtype: str
    """Dtype of the reply: the query's, if it states one."""
    arrays: dict[str, Array] = field(repr=False)
    """Tensors of the request by field, each with its batch dimension (and its head dimension if it has one)."""
    value_is: str
    """The field of the values: value, key or query."""
    dropout: Dropout | None = None
    learned: dict[str, Array] = field(default_factory=dict, repr=False)
    """Learned tensors of a raw request, or those of a module's parameters that the request replaces, by name."""

    sequence_masks: tuple[Sequence[Mask], ...] | None = None
    """The spec's masks with the request's global tokens: per sequence, or once if all are the same."""
    own_key_dim: int | None = None
    """Width of a head's keys if it differs from ``head_dim``, the width of its queries."""
    state_wanted: bool = False
    """True if the reply contains the running state after the last key."""
    cached: tuple[Cached, ...] | None = None
    """For each sequence its past in the pages of a session, of which ``arrays`` has the shape alone; None without."""
    threads: int = 0
    """Threads of the CPU that a blank request is planned for; 0 for a GPU."""

    def replaced(self, **changes: Any) -> "BoundRequest":
        """Return ``dataclasses.replace`` of this, ten times as fast."""
        made = object.__new__(BoundRequest)
        made.__dict__.update(self.__dict__, **changes)
        return made

    @property
    def sizes(self) -> Sizes | None:
        """The module's widths; None for raw attention."""
        return None if self.module is None else self.module.sizes

    @property
    def d_model(self) -> int | None:
        """Width of the model; None for raw attention."""
        return None if self.module is None else self.module.sizes.d_model

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the dtype of the computation."""
        return TORCH_DTYPES[self.dtype].itemsize

    @property
    def half(self) -> bool:
        """True for float16."""
        return self.dtype == "float16"

    @property
    def inputs(self) -> frozenset[str]:
        """Names of distinct input tensors."""
        return _INPUTS & self.arrays.keys()

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """Shape of the request's own mask as four dimensions; () for none."""
        mask = self.arrays.get("mask")
        return () if mask is None else (1,) * (4 - mask.ndim) + mask.shape

    @property
    def bool_mask(self) -> bool:
        """True if the request's mask is boolean."""
        return "mask" in self.arrays and self.arrays["mask"].dtype.kind == "b"

    @property
    def padded(self) -> bool:
        """True if a key mask or key lengths mark the real keys."""
        return "key_mask" in self.arrays or "key_lengths" in self.arrays

    @property
    def real_keys(self) -> int:
        """Keys up to the last that is real in any sequence, in whole cells of the blocked kernel; 0 for no padding."""
        lengths, mask = (self.arrays.get(name) for name in ("key_lengths", "key_mask"))
        if (lengths is None and mask is None) or not self.batch:
            return 0
        last = 2**62 if lengths is None else int(lengths.max())
        if mask is not None:
            real = np.flatnonzero(mask.any(0))
            last = min(last, int(real[-1]) + 1 if len(real) else 0)
        return -(-max(last, 1) // CUT.cell) * CUT.cell

    @property
    def masks_differ(self) -> bool:
        """True if sequences have different masks of positions."""
        return self.sequence_masks is not None and len(self.sequence_masks) > 1

    @property
    def batched_offsets(self) -> bool:
        """True if a positional mask differs between the sequences."""
        return "offsets" in self.arrays or self.masks_differ

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each sequence, as the computation clamps them; () for the default."""
        given = self.arrays.get("offsets")
        if given is None:
            return (self.past,) * self.batch * self.masks_differ
        return tuple(max(-MAX_POSITION, min(offset, MAX_POSITION)) for offset in given.tolist())

    @property
    def batched_places(self) -> bool:
        """True if rows of the batch have different places in a position encoding."""
        return "offsets" in self.arrays or "positions" in self.arrays

    @property
    def dropped(self) -> bool:
        """True if there is dropout."""
        return self.dropout is not None

    @property
    def sent(self) -> frozenset[str]:
        """Names of what is sent to a running state, and ``return_state`` if the final one is wanted."""
        return (_CARRIED & self.arrays.keys()) | ({"return_state"} if self.state_wanted else set())

    @property
    def fine_gate(self) -> bool:
        """True if the gate has a number for each feature."""
        gate = self.arrays.get("gate")
        return gate is not None and gate.ndim == 4

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The batched shape of the output."""
        if self.module is not None:
            return (self.batch, self.queries, self.module.sizes.d_model)
        if self.layout.merged:
            return (self.batch, self.queries, self.heads * self.value_dim)
        return (self.batch, self.heads, self.queries, self.value_dim)


def wrong_shape(name: str, expected: str, array: Array | None) -> ShapeMismatch:
    """Return the error for a tensor whose shape does not fit its role."""
    actual = list(array.shape) if array is not None else None
    return ShapeMismatch(
        f"{name}: expected {expected}; got shape {actual}", param=name, expected=expected, actual=actual
    )


def check_empty(arrays: Mapping[str, Array]) -> None:
    """Raise ShapeMismatch for a tensor without elements whose other sizes are too large."""
    for name, array in arrays.items():
        if not array.size and math.prod(max(size, 1) for size in array.shape) > _MAX_EMPTY:
            raise wrong_shape(name, f"sizes of at most {_MAX_EMPTY} elements beside a size of 0", array)


def common_dtype(arrays: Mapping[str, Array]) -> str:
    """Return the dtype of all tensors; float32 if none states one. Raises InvalidTensor if they differ."""
    named = {name: dtype_name(array) for name, array in arrays.items() if not isinstance(array, Untyped)}
    if len(set(named.values())) > 1:
        listed = ", ".join(f"{name} is {dtype}" for name, dtype in named.items())
        raise InvalidTensor(f"the tensors differ in dtype: {listed}; send them in one", param=list(named)[-1])
    return next(iter(named.values()), "float32")


def widened(array: Array, layout: Layout) -> Array:
    """Return a tensor of the query's rank with the dimensions that the query's layout omits."""
    if not layout.batched:
        array = array[None]
    return array if layout.headed else array[:, None]


def strip(value: Tensor, layout: Layout, *, heads_axis: bool) -> Tensor:
    """Remove from a batched result the dimensions that the query's layout omits."""
    if not layout.headed and heads_axis:
        value = value[:, 0]
    return value if layout.batched else value[0]

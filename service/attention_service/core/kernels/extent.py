"""One attention by its sizes and the shapes of its tensors, from which tiles, FLOPs and bytes are counted."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from attention_contract.spec import AttentionSpec, Mask
from attention_contract.tensors import Array
from attention_service.core.masks.rules import MAX_POSITION, causal_offset
from attention_service.core.problem import WeightDropout, Widths, added_keys
from attention_service.core.tensors import TORCH_DTYPES

CELL = 64
"""Keys that the blocked kernel takes or skips together."""
_INPUTS = frozenset({"query", "key", "value"})
_CARRIED = frozenset({"gate", "beta", "initial_state", "initial_normalizer"})


@dataclass(eq=False, kw_only=True)  # not frozen: that takes four times as long to make
class Extent(ABC):
    """One attention by its sizes, with the letters of ``core.problem``. They may be large: nothing is allocated.

    A request that is bound is one; here stands what kernels, methods and the cost model read of it.
    """

    spec: AttentionSpec
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    """K: all keys, with the past and the keys that the spec adds."""
    past: int
    head_dim: int
    value_dim: int
    dtype: str
    """Dtype of the computation."""
    arrays: dict[str, Array] = field(repr=False)
    """Tensors of the request by field, each with its batch dimension (and its head dimension if it has one)."""
    dropout: WeightDropout | None = None
    sequence_masks: tuple[Sequence[Mask], ...] | None = None
    """The spec's masks with the request's global tokens: per sequence, or once if all are the same."""
    own_key_dim: int | None = None
    """Width of a head's keys where it differs from ``head_dim``, as raw attention by an additive or bilinear score may.
    """
    state_wanted: bool = False
    """True if the reply contains the running state after the last key."""
    threads: int = 0
    """Threads of the CPU, each of which holds a tile of the fused kernel, of a blank request; 0 for a GPU."""

    @property
    @abstractmethod
    def d_model(self) -> int | None:
        """Width of the model; None for raw attention."""

    @property
    def widths(self) -> Widths:
        """Widths that determine the shapes of the spec's learned tensors."""
        return Widths(self.heads, self.kv_heads, self.head_dim, self.value_dim, self.d_model, self.own_key_dim)

    @property
    def key_dim(self) -> int:
        """Width of a head's keys."""
        return self.own_key_dim or self.head_dim

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the dtype of the computation."""
        return TORCH_DTYPES[self.dtype].itemsize

    # ── keys and pairs ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def pairs(self) -> int:
        """Query-key pairs of one head over the batch: B · Q · K."""
        return self.batch * self.queries * self.keys

    @property
    def added_keys(self) -> int:
        """Keys that the spec adds."""
        return added_keys(self.spec)

    @property
    def sequence_keys(self) -> int:
        """K as masks count it: without the keys that the spec adds."""
        return self.keys - added_keys(self.spec)

    @property
    def new_keys(self) -> int:
        """Keys that this request brings."""
        return self.keys - self.past - added_keys(self.spec)

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
        return -(-max(last, 1) // CELL) * CELL

    @property
    def unpadded_keys(self) -> int:
        """Number of keys that the blocked kernel visits: it skips padding of all sequences, as far as that is known."""
        return min(self.real_keys or self.sequence_keys, self.sequence_keys)

    # ── masks and positions ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """Shape of the request's own mask as four dimensions; () for none."""
        mask = self.arrays.get("mask")
        return () if mask is None else (1,) * (4 - mask.ndim) + mask.shape

    @property
    def bool_mask(self) -> bool:
        """True if the request's mask is boolean; otherwise it is added."""
        return "mask" in self.arrays and self.arrays["mask"].dtype.kind == "b"

    @property
    def padded(self) -> bool:
        """True if a key mask or key lengths mark the real keys."""
        return "key_mask" in self.arrays or "key_lengths" in self.arrays

    @property
    def masks_differ(self) -> bool:
        """True if sequences have different masks of positions."""
        return self.sequence_masks is not None and len(self.sequence_masks) > 1

    @property
    def batched_offsets(self) -> bool:
        """True if rows of the batch have different offsets or masks, so that a positional mask differs between them."""
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
    def reach(self) -> int | None:
        """Query i sees the keys up to i + reach, and no others; None for other masks and for unequal offsets."""
        if self.batched_offsets:
            return None
        reach = causal_offset(self.spec.masks, self.queries, self.sequence_keys, self.past)
        return None if reach is None else reach + self.past

    @property
    def plainly_causal(self) -> bool:
        """True if j ≤ i is all that the masks say: the fused kernel then takes none."""
        return not (self.mask_shape or self.padded or self.added_keys) and self.reach == 0

    # ── what the request brings and wants ────────────────────────────────────────────────────────────────────────────

    @property
    def inputs(self) -> frozenset[str]:
        """Names of distinct input tensors: self-attention has the query alone."""
        return _INPUTS & self.arrays.keys()

    @property
    def dropped(self) -> bool:
        """True if there is dropout."""
        return self.dropout is not None

    @property
    def sent(self) -> frozenset[str]:
        """Names of the tensors that the request sends to a running state, and ``return_state`` if it wants one."""
        return (_CARRIED & self.arrays.keys()) | ({"return_state"} if self.state_wanted else set())

    @property
    def fine_gate(self) -> bool:
        """True if the gate has a number for each feature."""
        gate = self.arrays.get("gate")
        return gate is not None and gate.ndim == 4

"""The sizes of one attention, from which its tiles and its FLOPs are counted."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from attention_contract.spec import AttentionSpec
from attention_service.core.masks.rules import causal_offset
from attention_service.core.problem import added_keys


class Extent(ABC):
    """One attention by its sizes, with the letters of ``core.problem``. They may be large: nothing is allocated.

    A request that is bound is one; here stands what kernels and methods read of it.
    """

    spec: AttentionSpec
    batch: int
    queries: int
    keys: int
    """K: all keys, with the past and the keys that the spec adds."""
    past: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    threads: int
    """Threads of the CPU, each of which holds a tile of the fused kernel; 0 for a GPU."""

    @property
    @abstractmethod
    def itemsize(self) -> int:
        """Bytes of one element of the dtype of the computation."""

    @property
    @abstractmethod
    def half(self) -> bool:
        """True if 2 bytes are a float16 and not a bfloat16."""

    @property
    @abstractmethod
    def mask_shape(self) -> Sequence[int]:
        """Shape of the request's own mask as four dimensions; empty for none."""

    @property
    @abstractmethod
    def padded(self) -> bool:
        """True if a key mask or key lengths mark the real keys."""

    @property
    @abstractmethod
    def real_keys(self) -> int:
        """Upper bound on the real keys of any sequence, which are the first; 0 if it is not known."""

    @property
    @abstractmethod
    def batched_offsets(self) -> bool:
        """True if rows of the batch have different offsets, so that a positional mask differs between them."""

    @property
    @abstractmethod
    def offsets(self) -> Sequence[int]:
        """Offset of each sequence, if they are known."""

    @property
    @abstractmethod
    def dropped(self) -> bool:
        """True if there is dropout."""

    @property
    @abstractmethod
    def sent(self) -> frozenset[str]:
        """Names of the tensors that the request sends to a running state, and ``return_state`` if it wants one."""

    @property
    @abstractmethod
    def fine_gate(self) -> bool:
        """True if that gate has a number for each feature."""

    @property
    @abstractmethod
    def d_model(self) -> int | None:
        """Width of the model; None for raw attention."""

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
    def unpadded_keys(self) -> int:
        """Number of keys that the blocked kernel visits: it skips padding of all sequences, as far as that is known."""
        return min(self.real_keys or self.sequence_keys, self.sequence_keys)

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

"""The sizes of one attention, from which its tiles and its FLOPs are counted."""

from dataclasses import dataclass, field
from functools import cached_property

import torch

from attention_contract.spec import AttentionSpec
from attention_service.core.masks.rules import causal_offset
from attention_service.core.problem import added_keys


@dataclass(frozen=True)
class Extent:
    """One attention by its sizes, with the letters of ``core.problem``. They may be large: nothing is allocated."""

    batch: int
    queries: int
    keys: int
    """K: all keys, with the past and the keys that the spec adds."""
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    """Bytes of one element of the dtype of the computation."""
    half: bool = False
    """True if 2 bytes are a float16 and not a bfloat16."""
    past: int = 0
    spec: AttentionSpec = field(default_factory=AttentionSpec)
    request_mask_elements: int = 0
    """Elements of the request's own mask; 0 for none."""
    padded: bool = False
    """True if a key mask or key lengths mark the real keys."""
    real_keys: int = 0
    """Upper bound on the real keys of any sequence, which are the first; 0 if it is not known."""
    batched_offsets: bool = False
    """True if rows of the batch have different offsets, so that a positional mask differs between them."""
    offsets: tuple[int, ...] = ()
    """Offset of each sequence, if they are known."""
    dropped: bool = False
    """True if there is dropout."""
    sent: frozenset[str] = frozenset()
    """Names among ``gate``, ``beta``, ``initial_state`` and ``initial_normalizer`` that the request sends to a running
    state, and ``return_state`` if it wants the final one."""
    fine_gate: bool = False
    """True if that gate has a number for each feature."""
    threads: int = field(default_factory=torch.get_num_threads)
    """Threads of the CPU, each of which holds a tile of the fused kernel; 0 for a GPU."""

    @property
    def d_model(self) -> int | None:
        """Width of the model; None for raw attention."""
        return None

    @property
    def added_keys(self) -> int:
        """Keys that the spec adds."""
        return added_keys(self.spec)

    @property
    def sequence_keys(self) -> int:
        """K as masks count it: without the keys that the spec adds."""
        return self.keys - self.added_keys

    @property
    def unpadded_keys(self) -> int:
        """Number of keys that the blocked kernel visits: it skips padding of all sequences, as far as that is known."""
        return min(self.real_keys or self.sequence_keys, self.sequence_keys)

    @cached_property
    def reach(self) -> int | None:
        """Query i sees the keys up to i + reach, and no others; None for other masks and for unequal offsets."""
        reach = (
            None
            if self.batched_offsets
            else causal_offset(self.spec.masks, self.queries, self.sequence_keys, self.past)
        )
        return None if reach is None else reach + self.past

    @property
    def plainly_causal(self) -> bool:
        """True if j ≤ i is all that the masks say: the fused kernel then takes none."""
        return not (self.request_mask_elements or self.padded or self.added_keys) and self.reach == 0

    @property
    def new_keys(self) -> int:
        """Keys that this request brings."""
        return self.sequence_keys - self.past

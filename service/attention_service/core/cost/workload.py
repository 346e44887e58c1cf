"""The sizes of one attention and the few facts about a request on which its cost depends."""

from dataclasses import dataclass, field, replace

import torch

from attention_contract.spec import AttentionSpec
from attention_service.core.apart import separate_positions
from attention_service.core.multihead import Sizes
from attention_service.core.types import Widths, added_keys


@dataclass(frozen=True)
class Workload:
    """One attention, known by its sizes alone. Sizes may be of any magnitude: nothing is allocated for them.

    Notation as in ``core.types``: B batch, H query heads, Hkv key/value heads, Q queries, K keys (the past included),
    P past keys, D head width, V value width.
    """

    batch: int
    queries: int
    keys: int
    """K, the past and what the spec adds included."""
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    """Bytes of one element of the dtype that is computed in."""
    past: int = 0
    spec: AttentionSpec = field(default_factory=AttentionSpec)
    sizes: Sizes | None = None
    """The module's widths; None for raw attention, which has no projections."""
    taps: frozenset[str] = frozenset({"output"})
    """What is returned."""
    selected_heads: int | None = None
    """How many heads of those taps; None for all."""
    selected_queries: int | None = None
    """How many queries of those taps; None for all."""
    request_mask_elements: int = 0
    """Elements of the request's own mask; 0 for none."""
    bool_mask: bool = False
    """Whether that mask is boolean; otherwise it is added."""
    padded: bool = False
    """Whether a key mask or key lengths say which keys are real."""
    batched_offsets: bool = False
    """Whether rows of the batch stand at different places, so that a positional mask differs between them."""
    batched_places: bool = False
    """Whether rows of the batch stand at different places in a position encoding."""
    edited: bool = False
    """Whether some tap is edited."""
    dropped: bool = False
    """Whether weights are dropped."""
    sent: frozenset[str] = frozenset()
    """Of ``gate``, ``beta``, ``initial_state`` and ``initial_normalizer`` those that the request brings to a running
    state, and ``return_state`` where it wants the last one."""
    fine_gate: bool = False
    """Whether that gate has a number for each feature."""
    reported: bool = False
    """Whether the error against exact attention is wanted."""
    inputs: frozenset[str] = frozenset({"query", "key", "value"})
    """Which of them are tensors of their own: self-attention has the query alone."""
    threads: int = field(default_factory=torch.get_num_threads)
    """Threads that each hold a tile of the fused kernel on a CPU; 0 on a GPU, where tiles live in shared memory."""

    @property
    def extra(self) -> int:
        """Keys that the spec adds."""
        return added_keys(self.spec)

    @property
    def apart(self) -> int:
        """Queries of each sequence that are projected apart, at most."""
        if self.sizes is None:
            return 0
        return min(len(separate_positions(self.spec.masks)), self.queries)

    @property
    def told_keys(self) -> int:
        """K as masks count it: without what the spec adds."""
        return self.keys - self.extra

    @property
    def new_keys(self) -> int:
        """Keys that this request brings."""
        return self.told_keys - self.past

    @property
    def widths(self) -> Widths:
        """What the shapes of the spec's learned tensors depend on."""
        d_model = None if self.sizes is None else self.sizes.d_model
        return Widths(self.heads, self.kv_heads, self.head_dim, self.value_dim, d_model)

    @property
    def pairs(self) -> int:
        """Query-key pairs of one head over the batch: B · Q · K."""
        return self.batch * self.queries * self.keys

    def at(self, dimension: str, value: int) -> "Workload":
        """The same with one size of a sweep changed; keys are the new ones, length is queries and new keys together."""
        match dimension:
            case "length":
                return replace(self, queries=value, keys=self.past + value + self.extra)
            case "batch":
                return replace(self, batch=value)
            case "queries":
                return replace(self, queries=value)
            case "keys":
                return replace(self, keys=self.past + value + self.extra)
            case "past":
                return replace(self, past=value, keys=self.new_keys + value + self.extra)
            case _:
                raise ValueError(f"dimension {dimension!r}: expected length, batch, queries, keys or past")

    def value(self, dimension: str) -> int:
        """The size that ``at`` changes."""
        sizes = {"length": self.queries, "batch": self.batch, "queries": self.queries, "keys": self.new_keys}
        return sizes.get(dimension, self.past)

"""The attention of one of vLLM's layers, as the problem that the core of attention-service computes.

Notation: R rows, H heads, Hkv key/value heads, Q queries, K keys, D width.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from attention_contract.spec import AttentionSpec, Causal, ScaledDot, SlidingWindow, Softmax
from attention_service.core.inspection.statistics import statistics_of
from attention_service.core.problem import Problem

PAGED_KERNELS = frozenset({"vec", "vec16"})
"""The kernels of CPU_ATTN whose pages are read here; those of others are packed for their instructions."""


@dataclass(frozen=True)
class LayerFacts:
    """The numbers of one layer that decide its attention."""

    heads: int
    kv_heads: int
    width: int
    scale: float
    window: int = 0
    """The keys that a query sees, its own included; 0 for all."""
    cap: float = 0.0
    """c of c·tanh(s / c); 0 for none."""
    sinks: Tensor | None = None
    """``[H]``"""

    @classmethod
    def of(cls, implementation: Any) -> "LayerFacts":
        """Read them from an implementation of vLLM's: ``layer.impl``."""
        given = implementation.sliding_window or 0
        # A tuple has the keys to the left and to the right of the query's own. Negative numbers stand for all.
        window = max(0, given[0] + 1 if isinstance(given, tuple) else given)
        return cls(
            implementation.num_heads, implementation.num_kv_heads, implementation.head_size, implementation.scale,
            window, float(implementation.logits_soft_cap or 0), implementation.sinks,
        )  # fmt: skip

    @cached_property
    def spec(self) -> AttentionSpec:
        """The same as a spec."""
        window = [SlidingWindow(left=self.window - 1)] if self.window else []
        return AttentionSpec(
            score=ScaledDot(scale=self.scale),
            softcap=self.cap or None,
            masks=[Causal(), *window],
            normalizer=Softmax(sinks=self.sinks is not None),
        )

    @cached_property
    def able(self) -> frozenset[str]:
        """The statistics of some attentions that this one has."""
        return statistics_of(self.spec)

    @cached_property
    def kind(self) -> Hashable:
        """Equal for layers that one problem can have side by side."""
        sinks = None if self.sinks is None else id(self.sinks)
        return self.heads, self.kv_heads, self.width, self.scale, self.window, self.cap, sinks

    def problem(self, q: Tensor, k: Tensor, v: Tensor | None, first: Tensor, lengths: Tensor | None = None) -> Problem:
        """Return the problem of queries ``[R, H, Q, D]`` and keys and values ``[R, Hkv, K, D]``, in float32.

        ``v``: None for the weights alone, for which no key needs to be a number. ``first [R]``: the position of the
        first query of each row. No query sees the keys behind its own. ``lengths [R]``: the keys of each row, whose
        values behind them may be anything; None if all rows have K.
        """
        learned = {} if self.sinks is None else {"sinks": self.sinks.float()}
        k = k.float()
        return Problem(
            q.float(), k, k[..., :1] if v is None else v.float(), self.spec, key_lengths=lengths, offsets=first,
            learned=learned, finite=v is None,
        )  # fmt: skip

    def key_head(self, head: int) -> int:
        """The key/value head that a head reads."""
        return head // (self.heads // self.kv_heads)


def refused_layer(implementation: Any, layer: Any) -> str | None:
    """Return the reason why the attention of a layer is not told of; None if it is."""
    if str(getattr(implementation.attn_type, "value", implementation.attn_type)) != "decoder":
        return f"attention of the kind {implementation.attn_type}"
    if implementation.alibi_slopes is not None:
        return "ALiBi"
    if str(implementation.kv_cache_dtype).startswith(("fp8", "int8", "nvfp4")):
        return f"keys and values kept as {implementation.kv_cache_dtype}"
    kernel = getattr(layer, "isa", None)
    if kernel is not None and kernel not in PAGED_KERNELS:
        return f"pages that are packed for the kernel {kernel!r}"
    return None

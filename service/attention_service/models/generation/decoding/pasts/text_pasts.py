"""The past of one text, as transformers keeps it, and the keys of several texts that one call of an attention reads.

Shapes: R rows, H heads, K keys, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

_JOINED: Final = {
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
}
"""The layers of transformers' caches that passes over several texts can have."""


def unjoinable(past: object) -> str | None:
    """Return why a text's past cannot be joined with others; None if it can."""
    own, encoded = own_past(past), encoded_past(past)
    if type(own) is not DynamicCache or type(encoded) not in {DynamicCache, type(None)}:
        return f"it keeps its past in a {type(past).__name__}"
    others = {type(layer) for layer in own.layers} - _JOINED
    others |= {type(layer) for layer in encoded.layers} - {DynamicLayer} if encoded is not None else set()
    return f"it keeps a {min(kind.__name__ for kind in others)}" if others else None


def own_past(past: Any) -> Any:
    """The keys and values of a text's own tokens: all of its past, or of a decoder that of its self-attentions."""
    return past.self_attention_cache if type(past) is EncoderDecoderCache else past


def encoded_past(past: Any) -> Any:
    """The keys and values that a decoder reads of its encoder; None of a model without one."""
    return past.cross_attention_cache if type(past) is EncoderDecoderCache else None


@dataclass(eq=False)
class PastPart:
    """Texts of a pass whose keys and values lie in one tensor."""

    rows: slice
    """Their places in the pass."""
    key: Tensor
    """``[R, H, K, D]``"""
    value: Tensor
    key_mask: Tensor | None
    """Bool ``[R, K]``, True for a key that the text's query sees; None if it sees all."""
    seen: Sequence[range]
    """The keys among which are those that each text's query sees: without those before the first, behind the last."""
    encoded: bool = False
    """True if the keys are those that an encoder made."""

"""A call of an attention function of ``transformers`` in the service's terms.

The arguments mean what they mean to the library's own ``sdpa_attention_forward``: without a mask, the module's
``is_causal`` counts.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from attention_contract.errors import InvalidRequest
from attention_contract.spec import AttentionSpec, Causal, Mask, ScaledDot, Softmax
from attention_transformers.model_layers import UnsupportedModel
from attention_transformers.model_masks import KnownMask, known_mask

_MASK: Final = "attention_service_mask"
_REFUSED: Final = {
    "block_indices": "selects blocks of keys for each query",
    "sinks": "brings a sink for each query",
    "cache": "keeps its keys in pages, for continuous batching",
}
"""Arguments of attention functions that the service has no field for."""


@dataclass(eq=False, slots=True)
class RawAttentionInputs:
    """The tensors and the spec of one attention, as a request for raw attention has them."""

    query: Tensor
    """``[B, H, Lq, D]``"""
    key: Tensor
    """``[B, Hkv, Lk, D]``"""
    value: Tensor
    """``[B, Hkv, Lk, Dv]``"""
    spec: AttentionSpec
    mask: Tensor | None
    """Bool or float, broadcastable to ``[B, H, Lq, Lk]``; None for no more than the spec says."""
    key_mask: Tensor | None
    """``[B, Lk]``, True for a real key."""
    offset: int
    """The position of the first query, counted from the first key."""
    sinks: Tensor | None
    """``[H]``"""
    weights: Tensor | None = None
    """``[B, H, Lq, Lk]``, if they are known; query, key and value then say sizes alone."""


@dataclass(eq=False, slots=True)
class AttentionCall:
    """The arguments of one call, checked."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    """Narrowed to the keys that each query selected."""
    causal: bool
    """True if no mask means a causal one."""
    scale: float | None
    softcap: float | None
    bias: Tensor | None
    """Added to the scores."""
    sinks: Tensor | None

    def raw(self, *, whole: bool = False) -> RawAttentionInputs:
        """Return the attention with its mask in as few numbers as describe it.

        ``whole``: keep the last keys that no query sees, as for taps that are to have all keys.
        """
        key, value = self.key, self.value
        known, mask = _mask(self.mask, self.query.shape[2], self.causal)
        key_mask = known.key_mask
        if known.keys is not None and known.keys < key.shape[2]:
            if whole:
                seen = torch.ones(len(key), known.keys, dtype=torch.bool, device=key.device)
                key_mask = nn.functional.pad(seen if key_mask is None else key_mask, (0, key.shape[2] - known.keys))
            else:
                key, value = key[:, :, : known.keys], value[:, :, : known.keys]
        return RawAttentionInputs(
            self.query,
            key,
            value,
            _spec(self.scale, self.softcap, known.masks, self.sinks is not None),
            self.biased(mask, key.shape[2]),
            key_mask,
            known.offset,
            None if self.sinks is None else self.sinks.to(self.query.dtype),
        )

    def biased(self, mask: Tensor | None, keys: int) -> Tensor | None:
        """Return the sum of a mask and the bias in the query's dtype; a bias of zeros that learns nothing is left out.

        ``keys``: the number of keys.
        """
        bias, dtype = self.bias, self.query.dtype
        if bias is None or not (bias.requires_grad or bool(bias.any())):
            return mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
        bias = bias[..., :keys].to(dtype)
        if mask is None:
            return bias
        return bias.where(mask, -torch.inf) if mask.dtype == torch.bool else bias + mask.to(dtype)


def attention_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> AttentionCall:
    """Check the arguments of an attention function.

    ``query [B, H, Lq, D]``, ``key [B, Hkv, Lk, D]``, ``value [B, Hkv, Lk, Dv]``; ``attention_mask`` bool or float,
    broadcastable to ``[B, H, Lq, Lk]``; ``position_bias`` is added to the scores; ``s_aux [H]`` are sinks;
    ``indices [B, Lq, n]`` are the keys that each query may see; ``cu_seq_lens_q`` are the ends of packed sequences,
    0 first, each of which sees itself alone.
    Raises UnsupportedModel for an argument that the service has no field for, and InvalidRequest for a mask that is
    neither bool nor float.
    """
    if attention_mask is not None and not (attention_mask.dtype == torch.bool or attention_mask.is_floating_point()):
        raise InvalidRequest.at(
            "attention_mask",
            f"expected a bool mask, True where a query may look, or a float mask, which is added to the scores; got "
            f"{str(attention_mask.dtype).removeprefix('torch.')}. Convert it with .bool()",
        )
    for name, meaning in _REFUSED.items():
        if others.get(name) is not None:
            raise UnsupportedModel(
                f"{type(module).__name__} {meaning} ({name}), which the service does not support; keep its layers "
                "local with `layers`, or load the model with attn_implementation='eager'",
                param=name,
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if indices is not None:
        attention_mask = _selected(indices, attention_mask, key.shape[2])
    if cu_seq_lens_q is not None and len(cu_seq_lens_q) > 2:
        attention_mask = _packed(cu_seq_lens_q)
    if len(query) < len(key):  # one set of learned queries for all sequences
        query = query.expand(len(key), -1, -1, -1)
    return AttentionCall(query, key, value, attention_mask, bool(causal), scaling, softcap, position_bias, s_aux)


@lru_cache(256)
def _spec(scale: float | None, softcap: float | None, masks: tuple[Mask, ...], sinks: bool) -> AttentionSpec:
    return AttentionSpec(
        score=ScaledDot(scale=scale), softcap=softcap, masks=list(masks), normalizer=Softmax(sinks=sinks)
    )


def _mask(mask: Tensor | None, queries: int, causal: bool) -> tuple[KnownMask, Tensor | None]:
    """Return a mask as few numbers and, if these are not all of it, as a tensor."""
    if mask is None:
        # As in SDPA: aligned at the first key; a static cache has room for keys that are not there yet.
        return (KnownMask((Causal(),), keys=queries) if causal and queries > 1 else KnownMask()), None
    known = known_mask(mask)
    if known is not None:
        return known, None
    if mask.dtype != torch.bool:  # the lowest number forbids, so that a query without keys gives zeros
        mask = mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)
    return KnownMask(), mask


def _packed(ends: Tensor) -> Tensor:
    """Return the mask ``[1, 1, L, L]`` of packed sequences. All layers share it, as they share the ends."""
    mask: Tensor | None = getattr(ends, _MASK, None)
    if mask is None:
        number = torch.repeat_interleave(ends.diff())
        mask = (number[:, None] == number)[None, None]
        setattr(ends, _MASK, mask)
    return mask


def _selected(indices: Tensor, mask: Tensor | None, keys: int) -> Tensor:
    """Narrow a mask to the keys that each query selected, ``indices [B, Lq, n]``."""
    chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)
    if mask is None:
        return chosen
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, -torch.inf)

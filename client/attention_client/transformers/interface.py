"""The attention function of ``transformers`` as requests to the service.

``attend`` takes the arguments that a model gives to its attention function. They mean what they mean to the library's
own ``sdpa_attention_forward``: without a mask, the module's ``is_causal`` counts.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from attention_client import Client
from attention_client.torch import remote_attention
from attention_client.torch.connection import Connection
from attention_client.transformers.model_layers import UnsupportedModel
from attention_client.transformers.model_masks import MASK_FUNCTION, KnownMask, known_mask, uncompiled
from attention_client.transformers.session_attention import attend_in_session, step_masks
from attention_client.transformers.session_layer import new_tokens
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import Edit, Tap
from attention_contract.spec import AttentionSpec, Causal, Mask, ScaledDot, Softmax

_REFUSED: Final = {
    "block_indices": "selects blocks of keys for each query",
    "sinks": "brings a sink for each query",
    "cache": "keeps its keys in pages, for continuous batching",
}
"""Arguments of attention functions that the service has no field for."""


def register(client: Client, name: str = "attention_service") -> str:
    """Make the service an attention implementation of ``transformers`` and return its name.

    ``AutoModel.from_pretrained(…, attn_implementation=name)`` then loads a model whose attention runs on the client's
    server. Another call with the same name replaces the client. The client must stay open, and threads share it.
    Raises TypeError for a client that is not a blocking one.
    """
    connection = connect(client)

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        output, taps = attend(connection, module, query, key, value, attention_mask, **options)
        return output, taps.get("weights")

    AttentionInterface.register(name, uncompiled(forward))
    AttentionMaskInterface.register(name, MASK_FUNCTION)
    return name


def connect(client: Client) -> Connection:
    """Return the way to the client's server. Raises TypeError for a client that is not a blocking one."""
    if not isinstance(client, Client):
        raise TypeError(f"client: expected an attention_client.Client, got {type(client).__name__}")
    return Connection(client)


def attend(
    connection: Connection,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    edits: Sequence[Edit] = (),
    record: Sequence[Tap] = (),
    **others: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run one attention on the service.

    ``query [B, H, Lq, D]``, ``key [B, Hkv, Lk, D]``, ``value [B, Hkv, Lk, Dv]``; ``attention_mask`` bool or float,
    broadcastable to ``[B, H, Lq, Lk]``; ``position_bias`` is added to the scores; ``s_aux [H]`` are sinks;
    ``indices [B, Lq, n]`` are the keys that each query may see. Returns the output ``[B, Lq, H, Dv]`` and the taps of
    ``record``, with the weights if the model asks for them. Gradients flow to all tensors.
    Raises UnsupportedModel for an argument that the service has no field for.
    """
    for name, meaning in _REFUSED.items():
        if others.get(name) is not None:
            raise UnsupportedModel(
                f"{type(module).__name__} {meaning} ({name}), which the service cannot; keep its layers local with "
                "`layers`, or load the model with attn_implementation='eager'",
                param=name,
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    tokens = new_tokens(key)
    if indices is not None:
        attention_mask = _selected(indices, attention_mask, key.shape[2])
    if len(query) < len(key):  # one set of learned queries for all sequences
        query = query.expand(len(key), -1, -1, -1)
    taps = tuple(dict.fromkeys((*record, "weights") if others.get("output_attentions") else record))
    drops = _dropout(dropout) if dropout and module.training else None
    if tokens is not None:
        fields = step_masks(tokens, query, attention_mask, causal=bool(causal))
        biased = _biased(fields.get("mask"), position_bias, key.shape[2], query.dtype)
        output, found = attend_in_session(
            tokens, query, fields if biased is None else {**fields, "mask": biased}, scale=scaling, softcap=softcap,
            sinks=s_aux, dropout=drops, edits=edits, taps=taps,
        )  # fmt: skip
        return output.transpose(1, 2).contiguous(), found
    known, mask = _mask(attention_mask, query.shape[2], bool(causal))
    if known.keys is not None and known.keys < key.shape[2]:
        key, value = key[:, :, : known.keys], value[:, :, : known.keys]
        mask = None if mask is None else mask[..., : known.keys]
    answer = remote_attention(
        query,
        key,
        value,
        mask=_biased(mask, position_bias, key.shape[2], query.dtype),
        key_mask=known.key_mask,
        offsets=torch.tensor(known.offset) if known.offset else None,
        spec=_spec(scaling, softcap, known.masks, s_aux is not None),
        parameters=None if s_aux is None else {"sinks": s_aux.to(query.dtype)},
        dropout=drops,
        edits=edits,
        taps=taps,
        client=connection,
    )
    output, found = answer if taps else (answer, {})
    return output.transpose(1, 2).contiguous(), found


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


def _selected(indices: Tensor, mask: Tensor | None, keys: int) -> Tensor:
    """Narrow a mask to the keys that each query selected, ``indices [B, Lq, n]``."""
    chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)
    if mask is None:
        return chosen
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, -torch.inf)


def _biased(mask: Tensor | None, bias: Tensor | None, keys: int, dtype: torch.dtype) -> Tensor | None:
    """Return the sum of a mask and a position bias in ``dtype``. A bias of zeros that learns nothing is left out."""
    if bias is None or not (bias.requires_grad or bool(bias.any())):
        return mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
    bias = bias[..., :keys].to(dtype)
    if mask is None:
        return bias
    return bias.where(mask, -torch.inf) if mask.dtype == torch.bool else bias + mask.to(dtype)


def _dropout(share: float) -> dict[str, Any]:
    """Return dropout whose seed comes from torch's generator: the same after the same ``torch.manual_seed``."""
    if share >= 1:
        raise InvalidRequest(f"dropout: expected a share below 1, got {share}", param="dropout")
    return {"p": share, "seed": int(torch.randint(2**31 - 1, ()))}

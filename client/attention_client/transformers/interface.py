"""The attention function of ``transformers`` as requests to the service."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from attention_client import Client
from attention_client.torch import remote_attention
from attention_client.torch.connection import Connection
from attention_client.transformers.session_attention import attend_in_session, step_masks
from attention_client.transformers.session_layer import new_tokens
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import Edit, Tap
from attention_transformers.function_calls import attention_call
from attention_transformers.model_masks import MASK_FUNCTION, uncompiled


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
    edits: Sequence[Edit] = (),
    record: Sequence[Tap] = (),
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run one attention on the service.

    The other arguments are those of ``attention_call``. Returns the output ``[B, Lq, H, Dv]`` and the taps of
    ``record``, with the weights if the model asks for them. Gradients flow to all tensors.
    Raises UnsupportedModel for an argument that the service has no field for.
    """
    tokens = new_tokens(key)
    call = attention_call(module, query, key, value, attention_mask, **options)
    taps = tuple(dict.fromkeys((*record, "weights") if options.get("output_attentions") else record))
    drops = _dropout(dropout) if dropout and module.training else None
    if tokens is not None:
        fields = step_masks(tokens, call.query, call.mask, causal=call.causal)
        biased = call.biased(fields.get("mask"), key.shape[2])
        output, tapped = attend_in_session(
            tokens, call.query, fields if biased is None else {**fields, "mask": biased}, scale=call.scale,
            softcap=call.softcap, sinks=call.sinks, dropout=drops, edits=edits, taps=taps,
        )  # fmt: skip
        return output.transpose(1, 2).contiguous(), tapped
    raw = call.raw(whole=bool(taps))
    answer = remote_attention(
        raw.query,
        raw.key,
        raw.value,
        mask=raw.mask,
        key_mask=raw.key_mask,
        offsets=torch.tensor(raw.offset) if raw.offset else None,
        spec=raw.spec,
        parameters=None if raw.sinks is None else {"sinks": raw.sinks},
        dropout=drops,
        edits=edits,
        taps=taps,
        client=connection,
    )
    output, tapped = answer if taps else (answer, {})
    return output.transpose(1, 2).contiguous(), tapped


def _dropout(share: float) -> dict[str, Any]:
    """Return dropout whose seed comes from torch's generator: the same after the same ``torch.manual_seed``."""
    if share >= 1:
        raise InvalidRequest.at("dropout", f"expected a share below 1, got {share}")
    return {"p": share, "seed": int(torch.randint(2**31 - 1, ()))}
